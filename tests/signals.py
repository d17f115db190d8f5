"""What a program that a test starts does with signals."""

from __future__ import annotations

import signal


def hear_all() -> None:
    """What a shell starts in the background, or nohup, is deaf to some, and so would be all that the tests start."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
