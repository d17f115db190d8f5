"""N users at once: on the real engine, and on one that fails under them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.command import Command
from appliance.engines.engine import Install
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.server import command
from appliance.errors import EngineDiedError, EngineNotReadyError
from appliance.plan import Plan
from appliance.tune.figures.slots import Concurrency, choose
from appliance.tune.figures.workload import CHAT, Workload
from appliance.tune.trials.concurrency import SYSTEM, measure_slots
from appliance.tune.trials.run_trial import Step
from benchmarks.memory import planned_for
from tests.golden.plans import CASES
from tests.golden.plans import space as golden_space
from tests.process.stages.engine import bench_of, find_engine
from tests.process.stages.supervisor import MakeCommand
from tests.shapes import SMALL, write_gguf

AGENT = Workload(name="agent", tokens_in=256, tokens_out=16, tokens_reused=192)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for the socket."""
    found = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    yield found
    shutil.rmtree(found)


@pytest.fixture
def plan_of(folder: Path) -> Callable[..., Plan]:
    binary = find_engine("llama-server")
    path = write_gguf(folder / "m.gguf", SMALL["gqa"], with_data=True)

    def make(**settings: str) -> Plan:
        return planned_for(query_facts(binary), path, {"ctx_size": "4096", "threads": "1", **settings})

    return make


async def measured(
    plan: Plan, folder: Path, workload: Workload, users: int, left_s: float = 3600.0, *, is_exact: bool = False
) -> Concurrency:
    binary = find_engine("llama-server")

    def start(plan: Plan) -> Command:
        install = Install(engine_dir=binary.parent, facts=query_facts(binary), cache_dir=folder)
        return command(plan, install, folder / "e.sock")

    told: list[str] = []
    found = await measure_slots(
        plan,
        bench_of(start),
        users=users,
        workload=workload,
        left_s=left_s,
        on_step=lambda step: told.append(step.what),
        is_exact=is_exact,
    )
    assert isinstance(found, Concurrency), found
    assert told[0] == "loading"
    assert told[-1].startswith(f"{users} users at once in {plan.parallel} slots")
    return found


async def test_each_user_gets_a_whole_job_that_no_other_has_read(plan_of: Callable[..., Plan], folder: Path) -> None:
    plan = plan_of(users="3")
    assert plan.parallel == 4
    found = await measured(plan, folder, replace(CHAT, tokens_in=200, tokens_out=24), users=3)
    assert (found.slots, found.users) == (4, 3)
    for job in found.jobs:
        assert job.tokens_read + job.tokens_cached == found.workload.tokens_in
        assert job.tokens_cached <= SYSTEM + 8
        assert 0 < job.ttft_s < job.seconds
    assert found.tokens_per_s > 0


async def test_with_one_slot_users_wait_for_one_another(plan_of: Callable[..., Plan], folder: Path) -> None:
    # Long answers: what this process takes to read them is little beside what the engine takes to make them.
    found = await measured(plan_of(parallel="1"), folder, replace(CHAT, tokens_in=200, tokens_out=1800), users=3)
    ended = sorted(job.seconds for job in found.jobs)
    begun = sorted(job.ttft_s for job in found.jobs)
    # Each begins when the one before it has ended; side by side all would begin at the same time.
    assert begun[1] - begun[0] > (ended[0] - begun[0]) / 2
    assert begun[2] - begun[1] > (ended[1] - begun[1]) / 2


async def test_an_agents_turn_reuses_what_the_turn_before_left(plan_of: Callable[..., Plan], folder: Path) -> None:
    for slots in ("3", "1"):  # in its slot, and out of the prompt cache
        found = await measured(plan_of(parallel=slots), folder, AGENT, users=2)
        assert found.workload == AGENT
        assert [job.tokens_cached for job in found.jobs] == [AGENT.tokens_reused] * 2


async def test_a_job_is_scaled_to_each_users_part_of_the_window_and_to_the_time(
    plan_of: Callable[..., Plan], folder: Path
) -> None:
    plan = plan_of(ctx_size="512")
    found = await measured(plan, folder, CHAT, users=2)
    assert found.workload.tokens_in + found.workload.tokens_out <= 256
    assert "scaled" in found.workload.name
    again = await measured(plan_of(parallel="1"), folder, found.workload, users=2, is_exact=True)
    assert again.workload == found.workload
    assert choose([found, again]).slots in (1, 4)


async def test_where_the_time_is_too_short_nothing_is_measured_and_why_is_said(
    make_command: MakeCommand, fake_plan: Plan
) -> None:
    told: list[str] = []

    async def slots(decode_ms: int, *knobs: str, left_s: float) -> Concurrency | str:
        return await measure_slots(
            fake_plan,
            bench_of(lambda _: make_command("--decode-ms", str(decode_ms), *knobs)),
            users=2,
            workload=CHAT,
            left_s=left_s,
            on_step=lambda step: told.append(step.what),
        )

    # The fake says that a token takes so long, and does not take it.
    said = await slots(600_000, left_s=3600.0)
    assert isinstance(said, str)
    assert said.startswith("jobs of 96 tokens for 2 users would take ")
    assert said.endswith(" s that are left")
    assert told == ["loading"], "no job was begun"
    never = await slots(10, "--load-seconds", "600", left_s=0.5)
    assert never == f"0.5 s were not enough for 2 users with {fake_plan.parallel} slots"


@pytest.mark.parametrize(
    ("knobs", "stall_s", "error", "words"),
    [
        (("--die-on-request",), 60.0, EngineDiedError, "asked to die"),
        (("--die-before-ready", "1"), 60.0, EngineNotReadyError, "exit"),
        (("--hang-on-completion",), 5.0, EngineNotReadyError, "no progress for 5 s"),
    ],
)
async def test_an_engine_that_fails_is_classified(
    make_command: MakeCommand,
    knobs: tuple[str, ...],
    stall_s: float,
    error: type[Exception],
    words: str,
    fake_plan: Plan,
) -> None:
    told: list[Step] = []
    with pytest.raises(error, match=words):
        await measure_slots(
            fake_plan,
            bench_of(lambda _: make_command(*knobs, stall_timeout_s=stall_s)),
            users=2,
            workload=CHAT,
            left_s=120.0,
            on_step=told.append,
        )
    assert told[0].what == "loading"


@pytest.fixture
def fake_plan() -> Plan:
    return golden_space(CASES[0]).best
