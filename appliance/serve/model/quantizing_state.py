"""How far quantizing of one served model is. A background task writes it, documents and the fleet read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.files.quantized import Quantization, QuantizedFile, note_document

if TYPE_CHECKING:
    from appliance.weights.download.meter import FetchProgress


class QuantizingState:
    """Data only."""

    def __init__(self) -> None:
        self.file: QuantizedFile | None = None  # made while the original serves: the next load takes it
        self.progress: FetchProgress | None = None
        self.is_over = False  # True once this process has nothing left to do
        self.why_not = ""  # why there is no file; empty if there is one

    def set_over(self, file: QuantizedFile | None, *, why: str = "") -> None:
        self.is_over, self.file = True, None if file and file.note.refused else file
        self.why_not = self.why_not or why

    def document(self, found: Quantization | None) -> dict[str, Any] | None:
        """Return the status document's part; None for a model that was quantized before it came here."""
        if found is None:
            return None
        file, facts = found.file or self.file, self.progress.facts() if self.progress else {}
        return {
            "type": found.kind,
            "words": self.why_not or found.describe(),
            "is_served": found.file is not None,
            "file": note_document(file.note) if file else None,
            **{name: facts.get(name) for name in ("bytes_done", "bytes_total", "seconds_left")},
        }
