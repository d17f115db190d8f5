"""What the ending of any engine means, whatever it says in its log."""

from __future__ import annotations

import signal

from appliance.engines.engine import Ending
from appliance.errors import CpuUnsupportedError, EngineHostMemoryError, FatalError

LAST_LINES = "its last lines are above"
REBUILD = "the image is damaged or was changed; pull or build it again"
MORE = "give the container more memory, or use a smaller --ctx-size or model"

Judged = tuple[type[FatalError], str, str | None]
"""The class, its hint, and the line of the log that decided."""

DECISIVE = (signal.SIGILL, signal.SIGKILL)
"""Whatever the log says of something else."""


def judge_signal(ending: Ending) -> Judged | None:
    """Of an ending by a decisive signal; None where the kernel did not kill for lack of memory."""
    if ending.signal == signal.SIGILL:
        return CpuUnsupportedError, "use an image built for an older CPU, or another machine", None
    return (EngineHostMemoryError, MORE, None) if ending.oom_kills else None


def hint_of_unknown(ending: Ending, *, lost_a_process: bool = False) -> str:
    """`lost_a_process` where the log says that one of several was killed, or is gone without a word."""
    was_killed = ending.signal == signal.SIGKILL
    if not (was_killed or lost_a_process) or ending.stalled:
        return LAST_LINES
    who = "somebody killed it" if was_killed else "one of its processes ended without a word, as if it was killed"
    if ending.oom_kills is None:
        return f"{who}; `dmesg` on the host tells whether the kernel did, for lack of memory"
    return f"{who}, and memory was not the reason; {LAST_LINES}"
