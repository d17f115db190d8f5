"""Every way to end badly, with its exit code (DESIGN.md section 6).

FatalError                      1
├─ UsageError                   2  the command line itself
├─ ConfigError                 10  a setting, a file of settings, or a missing choice
│  └─ ModelAwayError           10  the model would have to be fetched first
├─ NoKernelError               20  this image has no kernels for this GPU
├─ DriverTooOldError           21
├─ CpuUnsupportedError         22  the CPU lacks an instruction set
├─ GpuUnusableError            23  a GPU was asked for and cannot be used
├─ ModelUnreadableError        30  missing, damaged, or not a model at all
├─ ModelDoesNotFitError        31
├─ DownloadError               32
├─ CpuBackendError             44  the engine's CPU kernels cannot be loaded; another variant of them may be
├─ EngineError                     an ending of the engine; never raised itself
│  ├─ EngineArgumentsError     40
│  ├─ EngineGpuMemoryError     41
│  ├─ EngineHostMemoryError    42
│  ├─ EngineNotReadyError      43  also every ending that is not understood
│  ├─ EngineLibraryError       44
│  └─ EngineDiedError          45  while serving
└─ VolumeError                 50  not writable, full, or locked

Each message says what failed, with which value, and where the value came from; `hint` says what to do. `__main__`
is the only place that catches them.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` for a terminal: newlines and control sequences are shown as \\n and \\x1b."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class FatalError(Exception):
    """Ends the program with `exit_code`. The message has no final period, and the value stands after the colon.

    `log` holds the last lines of the engine's log, oldest first, if the engine's ending caused the error; otherwise it
    is empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log


class UsageError(FatalError):
    exit_code = 2


class ConfigError(FatalError):
    exit_code = 10


def damaged_data(path: object, error: Exception) -> ConfigError:
    """Return the error for a data file of this package that cannot be read."""
    message = f"data of this package cannot be read: {path}: {error}"
    return ConfigError(message, hint="install the package again; in a checkout: `python -m images render`")


class ModelAwayError(ConfigError):
    """Raised by a command that needs the model on the volume and does not download it."""

    def __init__(self, model: str) -> None:
        hint = "`appliance serve` fetches it when it starts, `appliance models pull` before"
        super().__init__(f"the model is not on the volume: {model}", hint=hint)


class NoKernelError(FatalError):
    exit_code = 20


class DriverTooOldError(FatalError):
    exit_code = 21


class KernelsError(FatalError):
    """The engine's CPU kernels do not run on this CPU. `variant` names the failed one if several were tried, else
    None."""

    variant: str | None = None


class CpuUnsupportedError(KernelsError):
    exit_code = 22


class GpuUnusableError(FatalError):
    exit_code = 23


class ModelUnreadableError(FatalError):
    exit_code = 30


class ModelDoesNotFitError(FatalError):
    exit_code = 31


class DownloadError(FatalError):
    exit_code = 32


class EngineError(FatalError):
    """An ending of the engine that a different plan may avoid. An unusable model, GPU or CPU is another error.

    `was_memory` is True if memory ran out, by the log or by the kernel's count, also while serving; only then a smaller
    plan helps. `needed_mib` is the size of the buffer that was refused, if the log tells it: at most so much was
    missing. `device` is the engine's name of the GPU that lacked the memory.
    """

    exit_code = 43

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        log: tuple[str, ...] = (),
        was_memory: bool = False,
        needed_mib: float | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, log=log)
        self.was_memory = was_memory
        self.needed_mib = needed_mib
        self.device = device


class EngineArgumentsError(EngineError):
    exit_code = 40


class EngineGpuMemoryError(EngineError):
    exit_code = 41


class EngineHostMemoryError(EngineError):
    exit_code = 42


class EngineNotReadyError(EngineError):
    exit_code = 43


class EngineLibraryError(EngineError):
    exit_code = 44


class GpuFaultError(EngineError):
    """A GPU failed while it ran a kernel of one plan. Another plan may not need that kernel."""

    exit_code = 23


class EngineDiedError(EngineError):
    exit_code = 45


class CpuBackendError(KernelsError):
    """The engine's CPU kernels cannot be loaded. Not an EngineError, since no other plan has other kernels."""

    exit_code = 44


class VolumeError(FatalError):
    exit_code = 50
