"""What a test could change of the process that it runs in, and so of whichever test comes next there."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

_PR_GET_CHILD_SUBREAPER = 37
_OF_PYTEST = "PYTEST_CURRENT_TEST"


def own_process() -> dict[str, Any]:
    return {
        "working directory": Path.cwd(),
        "umask": _umask(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "CPUs": os.sched_getaffinity(0),
        "is subreaper": _is_subreaper(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": {name: value for name, value in os.environ.items() if name != _OF_PYTEST},
    }


def _umask() -> str:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next((line for line in status.splitlines() if line.startswith("Umask:")), "")


def _is_subreaper() -> bool:
    """True if this process is a subreaper. Every orphan of its descendants then becomes its child, and tests that tell
    our work from others' would count it."""
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)
