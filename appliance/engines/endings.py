"""Rules that turn the end of an engine process into an exit code and a hint; those here hold for every engine.

The exit code is decided in this order:

1. The stall timer: 43, whatever the log says.
2. SIGILL: 22. SIGKILL: 42 if the kernel counted an out-of-memory kill, else 43.
3. The first line of the log that matches a rule. Lines about problems that the engine recovered from are skipped. If
   this line says that memory ran out, the last refused allocation counts instead, and a later line that matches a rule
   for another cause counts more.
4. The first line that matches a vague rule: such a line is often the consequence of a cause that was not logged.
5. How the process ended: some signals and lost processes have a hint. Everything else is 43 with the log.

Within one line a CUDA error counts before the engine's rules, and the rules are tried from the top.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from appliance.engines.cuda_errors import find_cuda_error
from appliance.engines.engine import Ending
from appliance.errors import (
    CpuUnsupportedError,
    DriverTooOldError,
    EngineGpuMemoryError,
    EngineHostMemoryError,
    EngineLibraryError,
    EngineNotReadyError,
    FatalError,
    GpuFaultError,
    GpuUnusableError,
    VolumeError,
)
from appliance.values import dataclass

LAST_LINES = "the log has its last lines"
POLICY = "a restart policy starts the container again"  # of an error that ends the container
REBUILD = "the image is damaged or was changed; pull or build it again"
MORE = "give the container more memory, or use a smaller --ctx-size or model"
OTHER_GPU = "check `nvidia-smi` on the host and that the container was started with `--gpus`"
SHM = "shared memory is too small for several processes: start the container with --shm-size 8g or --ipc=host"
OLDER_CPU = "use an image built for an older CPU, or another machine"
CUT = (
    "a file that was mapped became shorter or its disk failed, or /dev/shm is full: `appliance models verify` checks "
    "the model, `dmesg` on the host the disk, and --shm-size 8g gives room"
)
MEMORY = (EngineGpuMemoryError, EngineHostMemoryError)
OF_THE_DEVICE = (GpuFaultError, GpuUnusableError, DriverTooOldError)
"""Errors of the GPU or its driver. Their hint is the same at a start and while the engine serves."""

_REMEDIES: dict[int, str] = {
    signal.SIGBUS: CUT,
    signal.SIGTERM: f"another program ended it with SIGTERM; {LAST_LINES}",
    signal.SIGSEGV: f"the engine's own code failed: report it with the log; {LAST_LINES}",
    signal.SIGFPE: f"the engine's own code failed: report it with the log; {LAST_LINES}",
}
DECISIVE = (signal.SIGILL, signal.SIGKILL)
"""Signals that decide before the log is read."""

Judged = tuple[type[FatalError], str, str | None]
"""Error class, hint, and the log line that decided; None if no line did."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One meaning of a log line. `words` are the alternative wordings; all regular expressions of a wording must occur.
    They are compiled when a line is looked at, which few starts do. `source` names the code that prints them. A rule
    with `is_vague` decides only if no other rule matches any line."""

    name: str
    kind: type[FatalError]
    remedy: str
    words: tuple[tuple[str, ...], ...]
    source: str
    is_vague: bool = False

    def understands(self, text: str) -> bool:
        return any(all(re.search(word, text) for word in wording) for wording in self.words)


def rule(
    name: str,
    kind: type[FatalError],
    remedy: str,
    *words: str | tuple[str, ...],
    source: str,
    is_vague: bool = False,
) -> Rule:
    wordings = tuple((each,) if isinstance(each, str) else each for each in words)
    return Rule(name=name, kind=kind, remedy=remedy, words=wordings, source=source, is_vague=is_vague)


def meaning(text: str, rules: Iterable[Rule], *, more: str = "", vague: bool = False) -> Rule | None:
    """Return the rule that matches `text`, or None. `more` are further lines of the same message; they are searched for
    CUDA errors only."""
    if not vague and (error := find_cuda_error(f"{text}\n{more}")):
        return Rule(name=error.name, kind=error.kind, remedy=error.remedy, words=(), source="cuda_errors.yaml")
    return next((each for each in rules if each.is_vague == vague and each.understands(text)), None)


LINKER_RULES: tuple[Rule, ...] = (
    rule(
        "too many open files",
        EngineNotReadyError,
        "the container may open too few files: start it with --ulimit nofile=65536:65536",
        # The linker prints "Error 23" or "Error 24" if it has not loaded the texts of errors yet.
        r"Too many open files|cannot open shared object file: Error 2[34]\b",
        source="glibc strerror(EMFILE), strerror(ENFILE); elf/dl-load.c",
    ),
    rule(
        "library on a mount without execution",
        EngineLibraryError,
        "a library lies where nothing may be executed: mount the volume without noexec",
        r"failed to map segment from shared object: Operation not permitted",
        source="glibc elf/dl-load.c",
    ),
    rule(
        "no driver library",
        GpuUnusableError,
        OTHER_GPU,
        r"libcuda\.so\S*: cannot open shared object file",
        source="glibc elf/dl-load.c",
    ),
    rule(
        "library missing",
        EngineLibraryError,
        REBUILD,
        r"error while loading shared libraries|cannot open shared object file|symbol lookup error|undefined symbol: ",
        r"version `\S+' not found|cannot allocate memory in static TLS block",
        source="glibc elf/dl-load.c, elf/dl-lookup.c, elf/dl-version.c, elf/dl-tls.c",
    ),
)

HOST_RULES: tuple[Rule, ...] = (
    rule(
        "shared memory",
        EngineHostMemoryError,
        SHM,
        r"No space left on device[^\n]*/dev/shm|/dev/shm/\S+.*No space left|creating shared memory segment",
        r"unable to (?:open|write to|resize) (?:shared memory object|file) </",
        r"Insufficient space in /dev/shm",
        source="NCCL misc/shmutils.cc; torch MapAllocator.cpp; the kernel's ENOSPC with the name of the file",
    ),
    rule(
        "temporary folder is full",
        EngineNotReadyError,
        f"the container's /tmp is full: give it more with --tmpfs /tmp:size=2g; {LAST_LINES}",
        r"No space left on device[^\n]*['\"\[ ]/tmp/|['\"\[ ]/tmp/\S+.*No space left on device",
        source="the kernel's ENOSPC with the name of the file",
    ),
    rule(
        "volume is full",
        VolumeError,
        "the volume is full, or its disk: free some of it; `appliance models list` shows what lies there",
        r"No space left on device(?!: '/(?:tmp|dev)/)|Disk quota exceeded",
        source="glibc strerror(ENOSPC), strerror(EDQUOT)",
    ),
    rule(
        "no more threads",
        EngineNotReadyError,
        "the container may start too few threads: start it with a larger --pids-limit or --ulimit nproc, or use fewer "
        "--threads",
        r"[Tt]hread creation failed|can't start new thread|pthread_create (?:failed|error)|clone3? failed",
        r"(?:what\(\):|std::system_error|BlockingIOError|OSError|\bfork\w*\b).*Resource temporarily unavailable",
        source="libstdc++ std::thread (what(): strerror(EAGAIN)); libgomp team.c; CPython _threadmodule.c, os.fork",
    ),
    rule(
        "an instruction that the CPU lacks",
        CpuUnsupportedError,
        OLDER_CPU,
        r"^(?:Fatal Python error: )?Illegal instruction\b",
        source="CPython Modules/faulthandler.c; bash's words for SIGILL",
    ),
    rule(
        "bus error",
        EngineNotReadyError,
        CUT,
        r"^(?:Fatal Python error: )?Bus error\b",
        source="CPython Modules/faulthandler.c; bash's words for SIGBUS",
    ),
)


def judge_signal(ending: Ending) -> Judged | None:
    """Return the judgement for a signal of DECISIVE. None for SIGKILL if the kernel counted no out-of-memory kill."""
    if ending.signal == signal.SIGILL:
        return CpuUnsupportedError, OLDER_CPU, None
    return (EngineHostMemoryError, MORE, None) if ending.oom_kills else None


def hint_of_unknown(ending: Ending, *, lost_a_process: bool = False) -> str:
    """Return the hint for an ending that no rule matched. `lost_a_process` is True if the log says that one of several
    processes was killed or disappeared."""
    was_killed = ending.signal == signal.SIGKILL
    if ending.stalled:
        return f"a start that takes longer without a sign of work needs a larger --stall-timeout-s; {LAST_LINES}"
    if ending.signal in _REMEDIES:
        return _REMEDIES[ending.signal]
    if not (was_killed or lost_a_process):
        return LAST_LINES
    who = "it was killed" if was_killed else "one of its processes disappeared without a message, as if it was killed"
    if ending.oom_kills is None:
        return f"{who}; `dmesg` on the host shows whether the kernel did, for lack of memory"
    return f"{who}, and memory was not the reason; {LAST_LINES}"


def hint_while_serving(kind: type[FatalError] | None, remedy: str) -> str:
    """Return the hint for an engine that ended while it served. Remedies other than for memory and GPUs are about
    starting, so they are left out."""
    keeps = kind is not None and issubclass(kind, (*MEMORY, *OF_THE_DEVICE))
    return f"{remedy if keeps else LAST_LINES}; {POLICY}"


def mib_of(number: str, unit: float = 1.0) -> float:
    """Return MiB of a size as logs print it: `,` or `.` may separate its decimals. `unit` is the MiB of one unit."""
    whole, *rest = re.split(r"[.,]", number.strip(".,"))
    return float("".join((whole, *rest[:-1])) + (f".{rest[-1]}" if rest else "")) * unit
