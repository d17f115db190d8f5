"""The abilities suite through a gateway: rows that the old build passes have to pass on the new one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from appliance.abilities.record import Result
from appliance.abilities.rows import ROWS, Body
from appliance.abilities.suite import Offered, check
from appliance.errors import EngineNotReadyError
from appliance.host.court.judge import Verdict
from appliance.host.court.replay import Build
from appliance.host.docker.http import ANSWER_S, NoAnswerError
from appliance.values import dataclass

LIMIT_S = 90.0  # for each build; rows that are left count as not compared


@dataclass(frozen=True, kw_only=True)
class Rows:
    """`passed` by the old build; of these `lost` fail on the new one. The rest of `all` is not compared."""

    all: int
    passed: int
    compared: int
    lost: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return Verdict.LOST if self.lost else Verdict.AS_GOOD if self.compared else Verdict.NOT_DECIDED


class _Door:
    """A gateway as the suite asks it."""

    def __init__(self, build: Build) -> None:
        self._gateway = build.gateway

    async def exchange(self, route: str, body: Body) -> tuple[int, bytes]:
        try:
            return await asyncio.to_thread(self._gateway.post_raw, route, body, timeout_s=ANSWER_S)
        except NoAnswerError as error:
            message = f"the appliance broke off {route}: {error}"
            raise EngineNotReadyError(message, hint="see its log: `docker logs`") from error


def passes(build: Build, names: frozenset[str] | None = None, *, limit_s: float = LIMIT_S) -> dict[str, bool]:
    """Return whether the build passes each row; `names` (None: all) limits the rows. Raises EngineNotReadyError."""
    return asyncio.run(_passes(build, names, limit_s))


async def _passes(build: Build, names: frozenset[str] | None, limit_s: float) -> dict[str, bool]:
    found: dict[str, bool] = {}
    ends = time.monotonic() + limit_s
    for row in ROWS:
        if (names is None or row.name in names) and time.monotonic() < ends:
            ability = await check(_Door(build), row, build.model, Offered())
            found[row.name] = ability.result is Result.PASSED
    return found


def compare(old: Mapping[str, bool], new: Mapping[str, bool]) -> Rows:
    """Compare the rows that both builds were asked for. Pure."""
    passed = [name for name, is_passed in old.items() if is_passed]
    compared = [name for name in passed if name in new]
    return Rows(
        all=len(ROWS),
        passed=len(passed),
        compared=len(compared),
        lost=tuple(name for name in compared if not new[name]),
    )
