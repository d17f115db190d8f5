"""One child process: started, watched until it is ready, restarted when it dies, stopped, and never left behind.

Knows nothing of GPUs, plans or HTTP. Linux only (pidfd, prctl, /proc). README.md beside this file tells the design.
"""

from __future__ import annotations

from appliance.supervisor.crash import Crash
from appliance.supervisor.reaper import become_subreaper
from appliance.supervisor.state import State
from appliance.supervisor.supervisor import Restart, Supervisor

__all__ = ["Crash", "Restart", "State", "Supervisor", "become_subreaper"]
