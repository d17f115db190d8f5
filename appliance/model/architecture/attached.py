"""Attachments served with a model: a projector for images and sound, LoRA adapters."""

from __future__ import annotations

from pathlib import Path

from appliance.values import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Projector:
    path: Path
    kind: str
    reads: tuple[str, ...]  # image, audio
    length: int | None  # length of its output vectors, equal to the model's embedding length; None: unknown
    weights_bytes: int
    work_bytes: int  # buffers for the largest image or sound that it reads at once
    header_bytes: int

    @property
    def weights_mib(self) -> float:
        return self.weights_bytes / MIB

    @property
    def work_mib(self) -> float:
        return self.work_bytes / MIB


@dataclass(frozen=True, kw_only=True)
class Adapter:
    path: Path
    scale: float
    layer_bytes: tuple[tuple[int, int], ...]  # (layer, bytes of the adapter for it)
    other_bytes: int  # for matrices outside the layers
    size: int  # of the file
    header_bytes: int

    @property
    def weights_bytes(self) -> int:
        return self.other_bytes + sum(size for _, size in self.layer_bytes)
