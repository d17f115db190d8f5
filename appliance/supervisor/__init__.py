"""Runs one child process: starts it, watches it until it is ready, restarts it after a crash, stops it, leaves nothing
behind.

Knows nothing of GPUs, plans or HTTP. Linux only (pidfd, prctl, /proc). The design is described in README.md.
"""

from __future__ import annotations

from appliance.supervisor.crash import Crash
from appliance.supervisor.reaper import become_subreaper
from appliance.supervisor.state import State
from appliance.supervisor.supervisor import Restart, Supervisor

__all__ = ["Crash", "Restart", "State", "Supervisor", "become_subreaper"]
