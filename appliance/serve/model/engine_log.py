"""Log lines of engines that load, kept for the sizes of their buffers and for the cause of a failed load."""

from __future__ import annotations

import signal
from collections import deque

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.engines.engine import Engine
from appliance.plan import Plan
from appliance.supervisor import Restart, State, Supervisor

LOG_LINES = 5000  # kept until readiness; buffer sizes are among the first few hundred


class EngineLogs:
    """The lines of every supervised engine: the one that serves, and another that loads at the same time."""

    def __init__(self, engine: Engine, report: Report, *, restarts: bool = True) -> None:
        """`restarts` is False in a group of hosts, in which only the leader can decide on a restart."""
        self._restarts = restarts
        self._engine = engine
        self._report = report
        self._lines: dict[Supervisor, deque[str]] = {}

    def supervise(self, plan: Plan) -> Supervisor:
        """Return a supervisor whose lines are kept until readiness."""
        lines: deque[str] = deque(maxlen=LOG_LINES)
        # Another try with the same kernels would die of the same instruction.
        restart = Restart(not_after=frozenset({signal.SIGILL}) if plan.cpu_variant else frozenset())
        made = Supervisor(
            restart=restart if self._restarts else None, on_line=lambda line: self._on_line(made, lines, line)
        )
        self._lines = {each: kept for each, kept in self._lines.items() if each.state is not State.STOPPED}
        self._lines[made] = lines
        return made

    def take(self, supervisor: Supervisor) -> tuple[str, ...]:
        """Return the engine's lines up to its last readiness, and forget them."""
        lines = self._lines.get(supervisor)
        taken = tuple(lines or ())
        if lines is not None:
            lines.clear()
        return taken

    def _on_line(self, supervisor: Supervisor, lines: deque[str], line: str) -> None:
        if supervisor.state is State.STARTING:  # even while another engine serves
            lines.append(line)
            self._tell_step(line)
        if self._engine.is_worth_showing(line):
            self._report.warning("engine", line[:1000])

    def _tell_step(self, line: str) -> None:
        """Tell clients how far loading is, while they wait for this engine."""
        step = self._engine.step(line)
        if step is None or self._report.progress.phase is not Phase.LOADING:
            return
        self._report.phase(Phase.LOADING, step.words, stage=step.stage)
        self._report.info("engine_step", step.words, stage=step.stage, **step.facts)
