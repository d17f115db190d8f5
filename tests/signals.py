"""What a program that a test starts does with signals."""

from __future__ import annotations

import signal


def hear_all() -> None:
    """Reset INT, TERM and HUP to their defaults. Background jobs of a shell and of nohup ignore some of them, and
    programs that the tests start would inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
