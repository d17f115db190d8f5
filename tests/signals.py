"""What a program that a test starts does with signals."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """A shell starts what it puts into the background deaf to it, and so would be all that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
