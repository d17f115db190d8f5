"""How long requests may wait: by what reading their prompts is predicted to take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.gateway.engine.upstream import Response
from appliance.gateway.engine.upstream_pool import UpstreamPool
from appliance.gateway.engine.waits import Waits
from appliance.plan import Costs
from appliance.serve.model.demand import PATIENCE_S, EngineDemand
from appliance.serve.model.served_model import ServedModel

SOCKET, OTHER = Path("/run/a.sock"), Path("/run/b.sock")


def demand_of(upstream: UpstreamPool | None, *, prefill_ms: float = 1.0, parallel: int = 2) -> EngineDemand:
    space = SimpleNamespace(costs=lambda _: Costs(cpu_prefill_ms=prefill_ms))
    served = SimpleNamespace(upstream=upstream, patience_s=PATIENCE_S, space_of_profile=space)
    plan: Any = SimpleNamespace(parallel=parallel, context=10_000)
    return EngineDemand(cast(ServedModel, served), plan, SOCKET)


@pytest.mark.parametrize(
    ("prefill_ms", "bodies", "patience_s"),
    [
        (1.0, [3_000], 600.0),  # a prefill of a second
        (100.0, [3_000], 1_000.0),  # of a hundred
        (100.0, [3_000, 3_000, 3_000], 2_000.0),  # two are read beside each other
        (100.0, [10**7], 10_000.0),  # no prompt is longer than the context
    ],
)
async def test_it_is_ten_times_the_predicted_prefill_and_ten_minutes_at_least(
    prefill_ms: float, bodies: list[int], patience_s: float
) -> None:
    now = [0.0]
    waits = Waits(lambda: now[0])
    demand = demand_of(cast(UpstreamPool, SimpleNamespace(waits=lambda _: waits)), prefill_ms=prefill_ms)
    around = [waits.waiting(Response("POST"), body) for body in bodies]
    for each in around:
        each.__enter__()
    assert demand.pass_time(1.0).patience_s == 600.0  # as yet nobody needs to know
    now[0] += 301.0
    assert demand.pass_time(300.0).patience_s == patience_s
    assert demand.requests == len(bodies)
    for each in around:
        each.__exit__(None, None, None)


async def test_each_engine_has_the_requests_that_are_with_it() -> None:
    upstream = UpstreamPool(OTHER)
    demand = demand_of(upstream)
    assert (demand.requests, demand.pass_time(1.0).requests) == (0, 0)  # it is loaded beside the one that serves
    upstream.switch_to(SOCKET)
    waits = upstream.waits(SOCKET)
    assert waits is not None
    with waits.waiting(Response("POST"), 1):
        upstream.switch_to(OTHER)
        assert demand.requests == 1  # that it still works on
        demand.give_up("it sleeps")
    assert upstream.hangs == 1


def test_before_there_is_a_gateway_nobody_waits() -> None:
    demand = demand_of(None)
    demand.begin()
    demand.give_up("it sleeps")
    silence = demand.pass_time(1.0)
    assert (silence.requests, silence.seconds, demand.requests) == (0, 0.0, 0)
