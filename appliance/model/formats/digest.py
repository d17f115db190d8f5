"""Identify a model file without reading all of it: part of a profile's key, no proof that the weights are intact."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from appliance.errors import ModelUnreadableError
from appliance.values import dataclass

SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ModelDigest:
    """`samples_sha256` covers SAMPLES evenly spaced pieces, or the whole file if it is no longer than these pieces."""

    size: int
    header_sha256: str
    samples_sha256: str

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits of a hash over all fields."""
        text = f"{self.size}:{self.header_sha256}:{self.samples_sha256}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(paths: Sequence[Path], header_bytes: int) -> ModelDigest:
    """Digest a model's files, in order; `header_bytes` belongs to the first file.

    Models of the same shape have different weights, which the samples show. Raises ModelUnreadableError.
    """
    found = [_digest(path, header_bytes if path is paths[0] else 0) for path in paths]
    if len(found) == 1:
        return found[0]
    return ModelDigest(
        size=sum(part.size for part in found),
        header_sha256=found[0].header_sha256,
        samples_sha256=hashlib.sha256(" ".join(part.samples_sha256 for part in found).encode()).hexdigest(),
    )


def _digest(path: Path, header_bytes: int) -> ModelDigest:
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return ModelDigest(
                size=size,
                header_sha256=_hash(file.fileno(), [(0, min(header_bytes, size))]),
                samples_sha256=_hash(file.fileno(), _pieces(size)),
            )
    except OSError as error:
        message = f"model cannot be read: {path}: {error.strerror or error}"
        raise ModelUnreadableError(message, hint="check the file's owner and mode, and the disk") from error


def _pieces(size: int) -> list[tuple[int, int]]:
    """Offsets and lengths of the samples; the first begins and the last ends the file."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    last = size - SAMPLE_BYTES
    return [(last * position // (SAMPLES - 1), SAMPLE_BYTES) for position in range(SAMPLES)]


def _hash(descriptor: int, pieces: list[tuple[int, int]]) -> str:
    sha256 = hashlib.sha256()
    for offset, length in pieces:
        end = offset + length
        while offset < end:
            chunk = os.pread(descriptor, min(end - offset, 1 << 20), offset)
            if not chunk:
                message = f"it ended at byte {offset} while it was read"
                raise OSError(message)
            sha256.update(chunk)
            offset += len(chunk)
    return sha256.hexdigest()
