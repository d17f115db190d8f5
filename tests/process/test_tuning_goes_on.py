"""A whole tuning on fake programs, broken off and begun again: what was found out is not found out twice."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.engine import Inputs, Install
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.perplexity import BINARY
from appliance.engines.llama.process.server import speculation_arguments
from appliance.model import Model
from appliance.plan import Kernels, KvCheck, Plan
from appliance.profile import Key, Profile, ProfileStore
from appliance.serve.engine.measure import measure, measure_more
from appliance.serve.model.served_model import ServedModel
from appliance.settings import Settings, resolve_settings
from appliance.start.inputs import StartInputs
from appliance.tune.checkpoint import Partial
from appliance.tune.session import MORE_PLANS
from tests.builders import facts, model, profile
from tests.fakes.quick import program
from tests.golden.machines import MACHINES
from tests.process.stages.engine import Started
from tests.process.stages.supervisor import eventually, fake_command

READER = program("fake_perplexity")
KEY = Key(parts={"build": "b1", "model": "m1"})
IMAGE, ENGINE = facts(has_cuda=False)
# Every kind of step occurs: a type below q8_0 holds more context, drafts pay, and fewer slots than users may pay.
# The budget is enough for all steps.
FLAGS = {
    "fill_minutes": "0",
    "threads": "4",
    "ubatch": "512",
    "load_mode": "mmap",
    "users": "3",
    "mode": "speed",
    "cache_ram_mib": "1792",
}
SETTINGS = resolve_settings({**FLAGS, "budget_s": "30000"}, {})
FOR_CONTEXT = replace(SETTINGS, mode="context")
MACHINE = MACHINES["cpu-limit-8g"]
GUESSES = ("--guess", "ngram-mod:0.01,0.9")
QUICK = ("--decode-ms", "0.001", "--prefill-ms", "0.001")  # what the fake reports; it does not wait
WAIT_S = 120.0


@cache
def small() -> Model:
    return replace(model("qwen3-8b", "Q4_K_M"), native_context=16384)


def space(kv_checks: object) -> Space:
    assert isinstance(kv_checks, tuple)
    assert all(isinstance(kv_check, KvCheck) for kv_check in kv_checks)
    return Space(SETTINGS, IMAGE, ENGINE, MACHINE, small(), kv_checks=kv_checks)


@cache
def on_laptop(kv_checks: object) -> Space:
    assert isinstance(kv_checks, tuple)
    hardware, of = MACHINES["laptop-5060"], model("qwen3-30b-a3b", "Q3_K_M")
    return Space(FOR_CONTEXT, *facts(has_cuda=True), hardware, of, kv_checks=kv_checks)


class OnSpace(Started):
    """The engine with `make_space` as its space of plans."""

    def __init__(self, start: Callable[[Plan], Command], make_space: Callable[[object], Space]) -> None:
        super().__init__(start)
        self._make_space = make_space

    def space(self, inputs: Inputs, kv_checks: Sequence[KvCheck] = ()) -> Space:
        return self._make_space(tuple(kv_checks))


class Stage:
    """Tunings one after the other on one volume; `steps` are what they say that they start an engine for."""

    def __init__(self, folder: Path, socket_path: Path) -> None:
        self.folder, self.socket_path = folder, socket_path
        self.store = ProfileStore(folder, pytest.fail)
        self.knobs: Callable[[Plan], tuple[str, ...]] = lambda plan: ()
        self.starts = folder / "read"
        self.set_reader()
        self.log = StringIO()
        self.served = 0

    def set_reader(self, *knobs: str, where: str = "") -> None:
        """`knobs` for starts whose command line holds `where`, none for the rest."""
        run = shlex.join(READER)
        path = self.folder / BINARY
        path.write_text(f"""#!/bin/sh
echo >>{shlex.quote(str(self.starts))}
case "$* " in
*{shlex.quote(where)}*) exec {run} "$@" {shlex.join(knobs)} ;;
*) exec {run} "$@" ;;
esac
""")
        path.chmod(0o755)

    def _serve(self, plan: Plan) -> Command:
        self.served += 1
        return fake_command(self.socket_path, *QUICK, *GUESSES, *speculation_arguments(plan, ENGINE), *self.knobs(plan))

    def made(self, settings: Settings = SETTINGS, make_space: Callable[[object], Space] = space) -> ServedModel:
        """Return a served model whose engine is started only for measuring."""
        install = Install(engine_dir=self.folder, facts=ENGINE, cache_dir=self.folder, stall_timeout_s=60.0)
        inputs = Inputs(
            settings=settings,
            image=IMAGE,
            facts=ENGINE,
            hardware=MACHINE,
            model=small(),
            kernels=Kernels(variant=None, isa=MACHINE.cpu.isa),
        )
        start = StartInputs(engine=OnSpace(self._serve, make_space), install=install, inputs=inputs, key=KEY)
        self.last = ServedModel(start, {}, self.store, Report("json", self.log))
        return self.last

    @property
    def kept(self) -> Partial:
        return self.store.kept(KEY)

    def events(self, name: str) -> list[str]:
        rows = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [row["message"] for row in rows if row["event"] == name]

    def count_starts(self) -> Counter[str]:
        """Return how many engines were started so far, by what they were started for."""
        readings = len(self.starts.read_text().splitlines()) if self.starts.exists() else 0
        steps = self.events("tune_step")
        drafts = sum(step.endswith("draft tokens") for step in steps)
        loads = sum(step.endswith(": loading") for step in steps)
        assert self.served == drafts + loads
        slots = sum(" users at once in " in step for step in steps)
        return Counter(scored_chunks=readings, drafts=drafts, slots=slots)

    async def run_until(self, is_there: Callable[[Partial], bool]) -> Profile | None:
        """Return the profile of a whole tuning. If `is_there` holds first, the tuning is broken off and None is
        returned."""
        return await self._until(measure(self.made()), is_there)

    async def widen_until(self, profile: Profile, is_there: Callable[[Partial], bool]) -> Profile | None:
        """Do the same as `run_until` for what mode `context` measures after the profile, on a laptop."""
        return await self._until(measure_more(self.made(FOR_CONTEXT, on_laptop), profile), is_there)

    async def _until(self, story: Coroutine[Any, Any, Profile], is_there: Callable[[Partial], bool]) -> Profile | None:
        task = asyncio.create_task(story)
        try:
            await eventually(lambda: task.done() or is_there(self.kept), timeout_s=WAIT_S)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.last.finish_writing()


@pytest.fixture
def stage(tmp_path: Path, socket_path: Path) -> Stage:
    return Stage(tmp_path, socket_path)


def assert_nothing_twice(kept: Partial) -> None:
    texts = Counter((p.key, p.first) for p in kept.scored_chunks)
    drafts = Counter((look.key, look.tried.kind, look.tried.tokens) for look in kept.drafts)
    slots = Counter((look.key, look.slots) for look in kept.slots)
    assert set(texts.values()) | set(slots.values()) <= {1}
    assert all(count == 1 or (kind is None and count == 2) for (_, kind, _), count in drafts.items())


async def test_every_kind_of_step_is_there_and_a_tuning_that_ends_leaves_nothing_behind(stage: Stage) -> None:
    found = await stage.run_until(lambda kept: False)
    assert found is not None
    starts = stage.count_starts()
    assert starts["scored_chunks"] == 2
    assert starts["drafts"] >= 4
    assert starts["slots"] == 3
    assert [kv_check.is_accepted for kv_check in found.kv_checks] == [True]
    assert found.plan.speculation is not None
    assert stage.kept == Partial()


@pytest.mark.parametrize("kind", ["scored_chunks", "measurements", "drafts", "slots"])
async def test_a_tuning_that_was_broken_off_goes_on_after_each_kind_of_step(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory, socket_path: Path, kind: str
) -> None:
    whole = Stage(tmp_path_factory.mktemp("whole"), socket_path)
    expected = await whole.run_until(lambda kept: False)
    assert expected is not None

    if kind == "scored_chunks":
        stage.set_reader("--hang-after", "0", where="--cache-type-k q")
    assert await stage.run_until(lambda kept: bool(getattr(kept, kind))) is None
    stage.set_reader()
    kept, begun = stage.kept, stage.count_starts()
    found = await stage.run_until(lambda kept: False)
    assert found is not None
    assert stage.events("tune_goes_on") == [f"resuming an interrupted tuning with {kept.describe()}"]
    again = stage.count_starts() - begun
    # What was at work when it was broken off is done again, and nothing else.
    for name in ("scored_chunks", "drafts", "slots"):
        assert again[name] == whole.count_starts()[name] - len(getattr(kept, name)), name
    assert found.measurements[: len(kept.measurements)] == kept.measurements
    assert (found.plan.key, found.plan.speculation) == (expected.plan.key, expected.plan.speculation)
    assert [kv_check.kv_type for kv_check in found.kv_checks] == [kv_check.kv_type for kv_check in expected.kv_checks]
    assert found.kv_checks[0].difference == expected.kv_checks[0].difference


class ComeError(Exception):
    """A request has come."""


class Interrupted(ProfileStore):
    """A request comes as the first depth of a plan is kept."""

    has_come = False

    def keep(self, key: Key, partial: Partial) -> None:
        super().keep(key, partial)
        if partial.begun and not self.has_come:
            self.has_come = True
            raise ComeError


async def test_a_depth_that_was_measured_before_an_interruption_is_not_measured_again(stage: Stage) -> None:
    stage.store = Interrupted(stage.folder, pytest.fail)
    served = stage.made()
    served.unkept.is_enough = False  # then it is written at once
    with pytest.raises(ComeError):
        await measure(served)
    kept = stage.kept
    assert kept.measurements == ()
    (begun,) = kept.begun
    assert [point.depth for point in begun.points] == [32]
    assert kept.describe().startswith("1 depth of a measurement that was begun")
    found = await measure(stage.made())
    steps = Counter(stage.events("tune_step"))
    assert steps[f"{begun.key}: decoding with 32 tokens in the context"] == 1 + sum(
        m.key == begun.key for m in found.measurements[1:]
    )
    first = found.measurements[0]
    assert (first.key, first.points[: len(begun.points)]) == (begun.key, begun.points)
    assert len(first.points) > len(begun.points)
    assert stage.kept == Partial()


async def test_a_space_is_built_once_for_each_set_of_kv_checks(stage: Stage) -> None:
    built: list[object] = []

    def counted(kv_checks: object) -> Space:
        built.append(kv_checks)
        return space(kv_checks)

    served = stage.made(make_space=counted)
    assert served.space_of_profile is served.space
    served.profile = profile()
    assert served.profile.kv_checks
    assert served.space_of_profile is served.space_of_profile
    assert built == [(), served.profile.kv_checks]
    before = served.profile
    served.set_start(served.start)
    assert served.profile is before
    assert built == [(), profile().kv_checks, ()]
    served.set_start(replace(served.start, key=Key(parts={**KEY.parts, "cpu_variant": "other"})))
    assert served.space_of_profile is served.space  # another key has a profile of its own, here none
    assert built == [(), profile().kv_checks, (), ()]


async def test_a_row_of_stretches_that_each_find_one_thing_gets_to_its_end(stage: Stage) -> None:
    found, before = None, Partial()
    for _ in range(60):
        found = await stage.run_until(partial(_is_more_than, before))
        if found is not None:
            break
        now = stage.kept
        if now == Partial():  # it was broken off while its profile was saved
            found = stage.store.load(KEY)
            break
        for name in ("measurements", "scored_chunks", "drafts", "slots"):
            assert getattr(now, name)[: len(getattr(before, name))] == getattr(before, name)
        assert_nothing_twice(now)
        before = now
    assert found is not None, "it never ends"
    assert found.kv_checks[0].is_accepted
    assert found.plan.speculation is not None
    assert any("users:" in note for note in found.notes)
    assert stage.kept == Partial()


def _is_more_than(before: Partial, now: Partial) -> bool:
    """True if there is a result more; an engine that is about to be loaded is none."""
    return replace(now, loads=None) not in (replace(before, loads=None), Partial())


async def test_what_failed_once_is_tried_again_and_what_failed_twice_is_not(stage: Stage) -> None:
    def knobs(plan: Plan) -> tuple[str, ...]:
        return ("--die-on-request",) if plan.speculation else ()

    def fails(count: int) -> Callable[[Partial], bool]:
        return lambda kept: sum(look.tried.error is not None for look in kept.drafts) == count

    stage.knobs = knobs
    assert await stage.run_until(fails(1)) is None
    assert await stage.run_until(fails(2)) is None
    tried = sum("loading, up to" in step for step in stage.events("tune_step"))
    assert tried == 2
    assert (found := await stage.run_until(lambda kept: False)) is not None
    assert sum("loading, up to" in step for step in stage.events("tune_step")) == tried
    assert found.plan.speculation is None
    assert any("asked to die" in note for note in found.notes)


async def test_a_number_of_slots_that_failed_is_tried_once_more(stage: Stage) -> None:
    def knobs(plan: Plan) -> tuple[str, ...]:
        return ("--die-before-ready", "1") if plan.parallel == 2 else ()

    def errors(kept: Partial) -> int:
        return sum(look.error is not None for look in kept.slots)

    stage.knobs = knobs
    assert await stage.run_until(lambda kept: errors(kept) == 1) is None
    assert await stage.run_until(lambda kept: errors(kept) == 2) is None
    assert len(stage.events("slots_failed")) == 2
    stage.knobs = lambda plan: ()
    assert (found := await stage.run_until(lambda kept: False)) is not None
    assert len(stage.events("slots_failed")) == 2
    assert any("3 users:" in note for note in found.notes)


async def test_what_another_mode_wants_is_kept_and_goes_on_where_it_was_broken_off(stage: Stage) -> None:
    """A laptop with a GPU has many context lengths, and all of them hold."""
    found = await stage.run_until(lambda kept: False)
    assert found is not None
    plan = min(on_laptop(found.kv_checks).all(), key=lambda each: each.context)
    look = replace(next(m for m in found.measurements if len(m.points) > 2), key=plan.key)
    profile = replace(found, plans=(plan,), measurements=(look,))
    assert await stage.widen_until(profile, lambda kept: len(kept.measurements) == 1) is None
    (first,) = stage.kept.measurements
    widened = await stage.widen_until(profile, lambda kept: False)
    assert widened is not None
    assert widened.measurements[:2] == (look, first)
    keys = list(dict.fromkeys(m.key for m in widened.measurements))  # beside other work a plan may be measured again
    assert len(keys) == len(widened.plans) == 1 + MORE_PLANS
    contexts = {each.key: each.context for each in widened.plans}
    first_context, second_context = (contexts[key] for key in keys[1:])
    assert plan.context < first_context < second_context
    assert (widened.mode, widened.other_modes, widened.plan) == ("speed", ("context",), found.plan)
    assert stage.store.load(KEY) == widened
    assert stage.kept == Partial()
    assert stage.events("tuned_more") == ["measured 2 more for mode 'context'"]


async def test_looks_at_another_plan_are_not_mixed_with_those_of_this_one(stage: Stage) -> None:
    assert await stage.run_until(lambda kept: len(kept.slots) == 1) is None
    kept = stage.kept
    foreign = Partial(
        measurements=kept.measurements,
        scored_chunks=kept.scored_chunks,
        drafts=tuple(replace(look, key="of another plan") for look in kept.drafts),
        slots=tuple(replace(look, key="of another plan") for look in kept.slots),
    )
    begun = stage.count_starts()
    stage.store.keep(KEY, foreign)
    assert await stage.run_until(lambda kept: False) is not None
    again = stage.count_starts() - begun
    assert again["scored_chunks"] == 0
    assert again["drafts"] == len(kept.drafts)
    assert again["slots"] == 3
