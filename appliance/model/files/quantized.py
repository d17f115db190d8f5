"""Quantized files that the appliance made of unquantized models, each with a note that names its origin.

    models/.quantized/<digest of the origin>/<stem>-Q8_0.gguf
    models/.quantized/<digest of the origin>/<stem>-Q8_0.json         the note; a file without one is not used
    models/.quantized/<digest of the origin>/.<stem>-Q8_0.gguf.part   unfinished

The folder is hidden, so no search for models finds these files: they are served in place of their origin.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.documents import load, read
from appliance.model.architecture.facts import Model
from appliance.model.formats.ggml_types import UNQUANTIZED
from appliance.system.disk import read_file
from appliance.values import dataclass

FOLDER = ".quantized"
PART = ".part"
# Types that `auto` chooses from, the largest first. Below four bits the loss grows fast.
AUTO_KINDS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")
_NOTE_BYTES = 2**16
_FILES_MAX = 1_000


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of quality against the origin, by the probabilities of the tokens of one text."""

    difference: float  # nats per scored token; positive: the quantized file is worse
    standard_error: float  # of `difference`, from the means of the chunks
    tokens: int  # tokens that were read
    perplexity: float  # of the quantized file
    origin_perplexity: float

    @property
    def is_finite(self) -> bool:
        """False if the quantized file gives no probabilities."""
        return math.isfinite(self.difference)

    def describe(self) -> str:
        """Format the loss: `perplexity +0.35 % ± 0.12 % over 4,096 tokens`."""
        change, error = (100 * math.expm1(min(nats, 100.0)) for nats in (self.difference, self.standard_error))
        return f"perplexity {change:+.2f} % ± {error:.2f} % over {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is known of a quantized file. `loss` and `why_no_loss` are both None until the loss was measured."""

    kind: str
    origin: str  # path of the origin when the file was made; it may have been moved since
    digest: str  # digest of the origin, 16 hexadecimal digits
    origin_bytes: int
    bytes: int
    build: str  # id of the build whose llama-quantize made it
    made: str  # time in ISO 8601
    loss: Loss | None = None
    why_no_loss: str | None = None
    refused: str | None = None  # why the file was removed: it is never made again


@dataclass(frozen=True, kw_only=True)
class QuantizedFile:
    """A whole file with its note."""

    path: Path
    note: Note

    @property
    def loss_in_words(self) -> str:
        """The loss, or why there is no figure."""
        if self.note.refused:
            return f"refused: {self.note.refused}"
        if self.note.loss:
            return self.note.loss.describe()
        return f"loss unknown: {self.note.why_no_loss or 'not measured yet'}"


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The decision for one unquantized model: what is served in its place, and when it is made."""

    origin: Model
    digest: str  # of the origin
    kind: str | None  # None: the origin stays
    reason: str
    model: Model | None = None  # the model in that type, as predicted; None if the origin stays
    file: QuantizedFile | None = None  # it is on the volume, and serves
    comes_first: bool = False  # True if the origin does not fit, so that nothing can be served before

    @property
    def is_wanted(self) -> bool:
        """True if the file is missing and has to be made."""
        return self.kind is not None and self.file is None

    def path_in(self, models_dir: Path) -> Path:
        """Return the path of the quantized file on the volume."""
        return folder_of(models_dir, self.digest) / f"{_stem(self.origin)}-{self.kind}.gguf"

    def describe(self) -> str:
        """Return one sentence for the plan and the log."""
        name = self.origin.title
        if self.kind is None:
            return f"{self.origin.label} stays: {self.reason}"
        if self.file:
            return (
                f"{self.kind} serves in place of {name} ({self.origin.label}): {self.reason}; {self.file.loss_in_words}"
            )
        when = "before it is loaded, since the original does not fit" if self.comes_first else "while idle"
        return f"{name} ({self.origin.label}) is quantized to {self.kind} {when}: {self.reason}"


def _stem(model: Model) -> str:
    """Return the file's name without `.gguf` and the number of its part, shortened to what a volume takes."""
    name = model.called or model.path.name
    stem = name.removesuffix(".gguf").partition("-00001-of-")[0].replace("/", "-").replace(":", "-")
    return os.fsdecode(os.fsencode(stem)[:200])


def is_unquantized(model: Model) -> bool:
    return {kind for kind, _ in model.bytes_by_type} <= UNQUANTIZED


def folder_of(models_dir: Path, digest: str) -> Path:
    return models_dir / FOLDER / digest


def note_of(path: Path) -> Path:
    """Return the path of a quantized file's note."""
    return path.with_suffix(".json")  # a name ends with its type and .gguf, so no dot of the stem is lost


def read_quantized(path: Path) -> QuantizedFile | None:
    """Return the file with its note, or the note of a refused file; None if it has to be made anew."""
    try:
        note = read(Note, load(read_file(note_of(path), _NOTE_BYTES)))
        is_whole = note.refused is not None or path.stat().st_size == note.bytes
    except (OSError, ValueError):
        return None
    return QuantizedFile(path=path, note=note) if is_whole else None


def list_quantized(models_dir: Path, digests: Iterable[str] | None = None) -> tuple[QuantizedFile, ...]:
    """Return the whole and the refused files, in order of their paths. `digests` limits them to some origins."""
    folders = [models_dir / FOLDER / digest for digest in digests] if digests is not None else _folders(models_dir)
    notes = [path for folder in folders for path in sorted(folder.glob("[!.]*.json"))][:_FILES_MAX]
    paths = [path.with_suffix(".gguf") for path in notes]
    return tuple(found for path in paths if (found := read_quantized(path)))


def unfinished(models_dir: Path) -> tuple[Path, ...]:
    """Return the files that are being written, or were when their writer was killed."""
    return tuple(path for folder in _folders(models_dir) for path in sorted(folder.glob(f".*.gguf{PART}")))


def note_document(note: Note) -> dict[str, Any]:
    return asdict(note)


def note_bytes(note: Note) -> bytes:
    return json.dumps(note_document(note), indent=1).encode()


def _folders(models_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in (models_dir / FOLDER).iterdir() if path.is_dir())
    except OSError:
        return []
