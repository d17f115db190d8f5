"""How a llama-server (or another of its programs) ended, as one of the errors of DESIGN.md section 6.

Nearly every bad start exits with 1, and the cause stands some lines above the last. What decides, in this order: the
stall timer, a signal that has one meaning, the kernel's count of memory kills, then the first error line that is
understood. An ending that is not understood is 43 with its log, and never memory. tests/endings holds real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from appliance.engines.endings import DECISIVE, LAST_LINES, MORE, REBUILD, Judged, hint_of_unknown, judge_signal
from appliance.engines.engine import Ending
from appliance.engines.llama.log import may_be_error
from appliance.errors import (
    CpuBackendError,
    DriverTooOldError,
    EngineArgumentsError,
    EngineDiedError,
    EngineError,
    EngineGpuMemoryError,
    EngineHostMemoryError,
    EngineLibraryError,
    EngineNotReadyError,
    FatalError,
    GpuUnusableError,
    ModelUnreadableError,
    NoKernelError,
)
from appliance.plan import Shortage

_NAME = "llama-server"
_LESS = "use a smaller --ctx-size or --gpu-layers, a larger --n-cpu-moe, or free the GPU's memory"

# A line is tried from the top: what stands further down is wider.
_ROWS: tuple[tuple[str, type[FatalError], str], ...] = (
    (
        r"error while loading shared libraries|cannot open shared object file|symbol lookup error"
        r"|version `\S+' not found",
        EngineLibraryError,
        REBUILD,
    ),
    (
        r"no backends are loaded|no CPU backend found|CPU backend is not loaded",
        CpuBackendError,
        REBUILD,
    ),
    (
        r"PTX JIT compiler library not found",
        EngineLibraryError,
        "the driver's libnvidia-ptxjitcompiler.so is not in the container; use an image for this GPU's architecture",
    ),
    (
        # With its colon: "Invalid argument" is also what the kernel calls many a failed read.
        r"error: invalid argument: |unknown argument|error while handling argument|unsupported cache type"
        r"|error: invalid parameter for argument: ",
        EngineArgumentsError,
        "see `appliance plan --dry-run` for the command line",
    ),
    (
        r"the supplied chat template is not supported",
        EngineArgumentsError,
        "the template of --chat-template-file cannot be read as Jinja: mend it, or take the setting out",
    ),
    (
        r"no kernel image is available for execution|no device code compatible with CUDA arch",
        NoKernelError,
        "use an image that was built for this GPU's architecture; `appliance probe` shows it",
    ),
    (
        r"CUDA driver version is insufficient|PTX was compiled with an unsupported toolchain"
        r"|unsupported display driver / cuda driver combination",
        DriverTooOldError,
        "update the NVIDIA driver of the host, or use an image with an older CUDA release",
    ),
    (
        # cudaMalloc fails for other reasons too: a GPU that is busy or broken has not run out of memory.
        r"failed to initialize CUDA: |cudaMalloc failed: (?!out of memory)|no CUDA-capable device is detected",
        GpuUnusableError,
        "check `nvidia-smi` on the host and that the container was started with `--gpus`",
    ),
    (
        # Not CUDA_Host: that is memory of the host, pinned for the GPU.
        r"cudaMalloc failed: out of memory|CUDA error: out of memory"
        r"|(?:failed|unable) to allocate CUDA\d+ buffer",
        EngineGpuMemoryError,
        _LESS,
    ),
    (
        r"insufficient memory \(attempted to allocate|std::bad_alloc|(?:failed|unable) to allocate"
        r"|cannot allocate memory|\bout of memory\b",
        EngineHostMemoryError,
        MORE,
    ),
    (
        r"error loading model: |\bgguf_init_from_\w+: ",
        ModelUnreadableError,
        "fetch or convert the model again; if its architecture is unknown, this image's engine is too old for it",
    ),
)
_ENDINGS = tuple((re.compile(words, re.IGNORECASE), kind, hint) for words, kind, hint in _ROWS)
_MEMORY = (EngineGpuMemoryError, EngineHostMemoryError)

# The engine mends some failures by itself, and what it said of them is no cause of a later end.
_MENDED = re.compile(r"buffer allocation failed, retrying")
_DEVICE = re.compile(r"on device (\d+)|\bCUDA(\d+) buffer")
_FREE = re.compile(r"using device (CUDA\d+) .* - (\d+) MiB free")
_SIZES: tuple[tuple[re.Pattern[str], float], ...] = (
    (re.compile(r"allocating ([0-9.]+) MiB on device"), 1.0),
    (re.compile(r"allocate +([0-9.]+) Mi?B"), 1.0),  # it says MB and means 2^20 bytes
    (re.compile(r"buffer of size ([0-9]+)"), 2.0**-20),
)


def as_error(ending: Ending, *, served: bool = False, name: str = _NAME) -> FatalError:
    """Which error an ending is; `served` when the engine had been ready before, if not this time.

    `name` is of another of the engine's programs: all print the same lines.

    Only evidence decides: a time-out, a bad flag or a plain SIGKILL is never called memory.
    """
    message = f"engine {name} {ending.describe()}"
    found = None if ending.stalled else _judge(ending)  # whatever it said, the stall timer ended it
    kind, hint, line = found or (
        EngineNotReadyError,
        hint_of_unknown(ending),
        None,
    )
    if line is not None and line != ending.first_error:
        message += f"; the cause is {line}"
    was_memory = issubclass(kind, _MEMORY)
    needed_mib = _needed_mib(line, ending.log) if was_memory else None
    if ending.was_ready or served:
        kind = EngineDiedError
        hint = f"{hint if was_memory else LAST_LINES}; a restart policy starts the container again"
    if issubclass(kind, EngineError):
        device = _device(line, ending.log) if was_memory else None
        return kind(message, hint=hint, log=ending.log, was_memory=was_memory, needed_mib=needed_mib, device=device)
    return kind(message, hint=hint, log=ending.log)


def shortage_of(error: FatalError, lines: Iterable[str]) -> Shortage | None:
    """What an engine lacked that ran out of memory as it loaded; None for any other ending, and where its log tells no
    size or no GPU. `lines` are its whole log: what was free stands at its beginning."""
    if not isinstance(error, _MEMORY) or error.needed_mib is None:
        return None
    if isinstance(error, EngineHostMemoryError):
        return Shortage(refused_mib=error.needed_mib)
    if error.device is None:
        return None
    free = (found for line in lines if (found := _FREE.search(line)) and found[1] == error.device)
    first = next(free, None)  # a draft model that is loaded after it says so again
    free_mib = float(first[2]) if first else None
    return Shortage(refused_mib=error.needed_mib, device=error.device, free_mib=free_mib)


def _judge(ending: Ending) -> Judged | None:
    """None for what is not understood."""
    if ending.signal in DECISIVE:
        return judge_signal(ending)
    for line in _error_lines(ending):
        for pattern, kind, hint in _ENDINGS:
            if pattern.search(line):
                return kind, hint, line
    return None


def _error_lines(ending: Ending) -> Sequence[str]:
    """From the first error on, without what the engine mended and without lines that it marks as no error."""
    log = ending.log
    if ending.first_error is None:  # what a dynamic linker says need not look like an error
        return () if ending.was_ready else [line for line in log if may_be_error(line)]
    # A cause that has left the kept lines still counts; what follows it may have been kept.
    begin = log.index(ending.first_error) if ending.first_error in log else 0
    mended = max((number for number, line in enumerate(log) if _MENDED.search(line)), default=-1)
    if mended >= begin:
        return [line for line in log[mended + 1 :] if may_be_error(line)]
    return [ending.first_error, *(line for line in log[begin:] if may_be_error(line))]


def _needed_mib(line: str | None, log: tuple[str, ...]) -> float | None:
    """The size of the buffer that was refused: at most so much was missing. None where the log tells no size."""
    if line is None:
        return None
    for said in (line, *log[log.index(line) if line in log else 0 :]):
        for pattern, mib in _SIZES:
            if found := pattern.search(said):
                return float(found[1]) * mib
    return None


def _device(line: str | None, log: tuple[str, ...]) -> str | None:
    """The engine's name of the GPU whose memory was refused; None for the host's, and where the log names none."""
    for text in (line or "", *reversed(log)):
        if found := _DEVICE.search(text):
            return f"CUDA{found[1] or found[2]}"
    return None
