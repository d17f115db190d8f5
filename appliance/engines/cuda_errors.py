"""Errors of the CUDA runtime and driver that end an engine, and their remedies. The table is cuda_errors.yaml.

Running out of memory is not in the table: each engine's own rules read it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from appliance.engines.tables import load_table
from appliance.errors import (
    DriverTooOldError,
    EngineLibraryError,
    EngineNotReadyError,
    FatalError,
    GpuFaultError,
    GpuUnusableError,
    NoKernelError,
)
from appliance.values import dataclass

_DATA = Path(__file__).with_name("cuda_errors.yaml")
GROUPS: dict[str, type[FatalError]] = {
    "driver_too_old": DriverTooOldError,
    "library_missing": EngineLibraryError,
    "no_kernels": NoKernelError,
    "unusable": GpuUnusableError,
    "fault": GpuFaultError,
    "kernel_bug": EngineNotReadyError,
}

# "unknown error" or "operation not permitted" may come from anything, so such a text counts only after a name of CUDA:
# "CUDA error: TEXT", "cudaMalloc failed: TEXT", "Error 802: TEXT" after cudaGetDeviceCount(), "Cuda failure 802
# 'TEXT'", "[CUDA]: TEXT".
_SPEAKER = r"\b(?:CUDA|cuda[A-Z]\w*|Cuda|CUDART|cu[A-Z]\w+|NCCL)\b"
_NUMBER = re.compile(rf"{_SPEAKER}.*?(?:\b[Ee]rror (?:code )?|\bfailure )(\d{{1,3}})(?=[:)']|$)", re.DOTALL)
_NAME = re.compile(r"\b(?:cudaError[A-Z]\w+|CUDA_ERROR_[A-Z_]+|CUBLAS_STATUS_[A-Z_]+)\b")


@dataclass(frozen=True, kw_only=True)
class CudaError:
    number: int | None  # None for cuBLAS: its numbers would clash with those of CUDA
    name: str
    driver_name: str  # empty if only the runtime has this error
    text: str
    kind: type[FatalError]
    remedy: str


def find_cuda_error(words: str) -> CudaError | None:
    """Return the first error of the table that CUDA reports in `words` (one or more lines): by text, else by name, else
    by number. None if there is none, and None for "out of memory"."""
    if "out of memory" in words:
        return None
    if found := _texts().search(words):
        return _by("text")[found[1].lower()]
    names = _by("name") | _by("driver_name")
    if known := next((names[name] for name in _NAME.findall(words) if name in names), None):
        return known
    return next((known for number in _NUMBER.findall(words) if (known := _by("number").get(number))), None)


@cache
def load_cuda_errors() -> tuple[CudaError, ...]:
    return tuple(
        CudaError(
            number=number, name=name, driver_name=driver, text=text, kind=GROUPS[group["is"]], remedy=group["remedy"]
        )
        for group in load_table(_DATA)
        for number, name, driver, text in group["errors"]
    )


@cache
def _by(field: str) -> dict[str, CudaError]:
    found: dict[str, CudaError] = {}
    for error in load_cuda_errors():
        if key := str(getattr(error, field) or ""):
            found.setdefault(key.lower() if field == "text" else key, error)
    return found


@cache
def _texts() -> re.Pattern[str]:
    """Return the pattern of all error texts. Longer texts come first, since one may begin like another."""
    texts = sorted((error.text for error in load_cuda_errors()), key=len, reverse=True)
    return re.compile(rf"{_SPEAKER}[^\n]*?[:'(\]] ?((?i:{'|'.join(map(re.escape, texts))}))(?=$|[\s.,;'\")(])")
