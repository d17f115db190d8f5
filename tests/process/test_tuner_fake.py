"""The whole loop of the tuner on an engine whose speeds, failures and memory the test knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from appliance.command import Command
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.errors import EngineArgumentsError, EngineError, EngineGpuMemoryError, EngineNotReadyError
from appliance.model import Model
from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.probe.load.conditions import SHORTEST_S
from appliance.probe.load.load import LoadSample
from appliance.probe.load.watch import Watch
from appliance.settings import resolve_settings
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.modes import Mode
from appliance.tune.figures.speeds import speeds_on
from appliance.tune.figures.workload import parse_mix
from appliance.tune.trials.run_trial import FirstSampling, Sampling, Step, measure
from appliance.tune.tuner import Goal, Tuned, Tuner
from tests.builders import facts, model
from tests.golden.machines import MACHINES
from tests.process.stages.engine import bench_of
from tests.process.stages.supervisor import fake_command

NO_MEMORY = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {mib:.2f} MiB on device 0: cudaMalloc failed: out of memory"
)


def space(machine: str, of: Model) -> Space:
    hardware = MACHINES[machine]
    image, engine = facts(has_cuda=bool(hardware.gpus.gpus))
    # without slots for experts, which tests/unit/moe/test_moe_tuned.py tunes
    settings = resolve_settings({"fill_minutes": "0", "moe_slots": "off"}, {})
    return Space(settings, image, engine, hardware, of)


@cache
def on_cpu() -> Space:
    return space("cpu-16g", replace(model("qwen3-8b", "Q4_K_M"), native_context=16384))


@cache
def on_laptop() -> Space:
    return space("laptop-5060", model("qwen3-30b-a3b", "Q3_K_M"))


@cache
def laptop_plans() -> tuple[Plan, ...]:
    """Return the plans with the best plan's KV type, threads and load mode: every context length, ubatch and number of
    experts in host memory."""
    best = on_laptop().best
    alike = (best.kv_type, launch_of(best).threads, launch_of(best).load_mode)
    return tuple(p for p in on_laptop().all() if (p.kv_type, launch_of(p).threads, launch_of(p).load_mode) == alike)


class Bench:
    """`decode_ms` and `knobs` say of each plan how fast its engine is and what goes wrong in it."""

    def __init__(
        self,
        socket_path: Path,
        decode_ms: Callable[[Plan], float] = lambda plan: 10.0,
        *,
        prefill_ms: Callable[[Plan], float] = lambda plan: 1.0,
        knobs: Callable[[Plan], Sequence[str]] = lambda plan: (),
    ) -> None:
        self._socket_path = socket_path
        self._decode_ms = decode_ms
        self._prefill_ms = prefill_ms
        self._knobs = knobs
        self.started: list[str] = []
        self.done: list[Measurement] = []
        self.disturbed = 0  # the number of steps in which a hypervisor steals CPU time
        self._stolen_s = 0.0

    def start(self, plan: Plan) -> Command:
        self.started.append(plan.key)
        speeds = ("--decode-ms", f"{self._decode_ms(plan):.6f}", "--prefill-ms", f"{self._prefill_ms(plan):.6f}")
        return fake_command(self._socket_path, *speeds, *self._knobs(plan))

    def tell(self, step: Step) -> None:
        if self.disturbed and step.what != "loading":
            self.disturbed -= 1
            time.sleep(SHORTEST_S)  # shorter intervals tell nothing
            self._stolen_s += 1

    def sample(self) -> LoadSample:
        """Return a sample of a machine on which nothing else runs. Stolen time is what `tell` has added."""
        return LoadSample(time_s=time.monotonic(), cpus=1, busy_s=0.0, steal_s=self._stolen_s, own_s=0.0)

    async def tune(
        self,
        here: Space,
        plans: Sequence[Plan],
        *,
        mode: Mode = "balanced",
        workload: str = "chat",
        budget_s: float = 1000.0,
        kept: Sequence[Measurement] = (),
    ) -> Tuned:
        return await self._tuner(here, plans, mode, workload, budget_s, kept).run()

    async def widen(
        self, here: Space, plans: Sequence[Plan], *, mode: Mode, kept: Sequence[Measurement], budget_s: float = 1000.0
    ) -> tuple[Plan, ...]:
        """Measure plans for the mode. Returns all plans that have been measured."""
        tuner = self._tuner(here, plans, mode, "chat", budget_s, kept)
        await tuner.widen(2)
        return tuner.measured

    def _tuner(
        self,
        here: Space,
        plans: Sequence[Plan],
        mode: Mode,
        workload: str,
        budget_s: float,
        kept: Sequence[Measurement],
    ) -> Tuner:
        return Tuner(
            here,
            plans,
            partial(
                measure,
                bench=bench_of(self.start),
                on_step=self.tell,
                watch=lambda: Watch(self.hardware, {}, sample=self.sample),
            ),
            Goal(mix=parse_mix(workload), mode=mode, native=here.native),
            budget_s=budget_s,
            on_result=self.done.append,
            kept=kept,
        )

    @property
    def hardware(self) -> Hardware:
        return MACHINES["cpu-16g"]  # one without a GPU to be watched


def few() -> list[Plan]:
    """Return the plans with the best plan's KV type and load mode, 8 or 4 threads, and a ubatch of 512 or 256."""
    alike = (on_cpu().best.kv_type, launch_of(on_cpu().best).load_mode)
    found = [p for p in on_cpu().all() if (p.kv_type, launch_of(p).load_mode) == alike]
    return [p for p in found if launch_of(p).threads in (8, 4) and launch_of(p).ubatch in (512, 256)]


@pytest.mark.parametrize(("threads", "ubatch"), [(8, 512), (4, 256)])
async def test_the_fastest_plan_is_found_and_looked_at_longer(socket_path: Path, threads: int, ubatch: int) -> None:
    plans = few()
    bench = Bench(
        socket_path,
        lambda plan: 10.0 if launch_of(plan).threads == threads else 15.0,
        prefill_ms=lambda plan: 5.0 if launch_of(plan).ubatch == ubatch else 9.0,
    )
    tuned = await bench.tune(on_cpu(), plans)
    assert (launch_of(tuned.plan).threads, launch_of(tuned.plan).ubatch) == (threads, ubatch)
    assert tuned.measurements == tuple(bench.done)
    assert [m.key for m in bench.done] == bench.started
    assert len({tuple(point.depth for point in m.points[:2]) for m in bench.done}) == 1, "all at the same depths"
    (*_, looked) = [m for m in bench.done if m.key == tuned.plan.key and m.is_long]
    assert [point.depth for point in looked.points] == sorted(point.depth for point in bench.done[0].points)
    assert looked.points[0].decode_ms == pytest.approx(10 * (1 + looked.points[0].depth / 2048))
    assert {plan.key for plan in tuned.plans} >= set(bench.started)
    measured = [c for c in tuned.plan.choices if c.source == "measured"]
    assert bool(measured) is (len(tuned.plans) > 1), "measuring is the reason where something was compared"
    assert all("a chat job" in choice.reason for choice in measured)
    assert tuned.disturbance is None


async def test_the_first_look_is_at_the_prediction_at_three_depths(socket_path: Path) -> None:
    bench = Bench(socket_path)
    await bench.tune(on_cpu(), few())
    assert bench.started[0] == on_cpu().best.key
    empty, work, deep = (point.depth for point in bench.done[0].points)
    assert empty == 32
    assert work == 640  # half of a chat's answer after its prompt
    assert deep > 2 * work


@pytest.mark.parametrize(("budget_s", "fewest", "most"), [(40.0, 3, 19), (2.0, 3, 3)])
async def test_at_half_a_token_a_second_the_first_look_decodes_what_the_budget_has_room_for(
    socket_path: Path, budget_s: float, fewest: int, most: int
) -> None:
    """It decodes at least as much as warming up did, so that there is always a figure. The fake engine does not really
    wait: this machine's speed matters little."""
    bench = Bench(socket_path, lambda plan: 2000.0, prefill_ms=lambda plan: 100.0)
    tuned = await bench.tune(on_cpu(), [on_cpu().best], budget_s=budget_s)
    (point,) = bench.done[0].points
    assert point.depth == 32
    assert point.decode_ms == pytest.approx(2000 * (1 + 32 / 2048))
    tokens = 1 + 23 / point.noise_factor**2
    assert fewest - 0.01 <= tokens <= most + 0.01
    assert "few tokens) at 32" in bench.done[0].describe()
    assert tuned.plan.key == on_cpu().best.key


async def test_a_workload_longer_than_the_window_is_scaled_and_the_speeds_say_so(socket_path: Path) -> None:
    best = on_cpu().best
    tuned = await Bench(socket_path).tune(on_cpu(), [best], workload="document")
    scaled = f"long document (scaled to {best.context})"
    (job,) = speeds_on(tuned.chosen.scored.curve, tuned.plan, parse_mix("document")).jobs
    assert (job.workload, job.tokens_in + job.tokens_out) == (scaled, best.context)
    assert not [c for c in tuned.plan.choices if c.source == "measured"], "of one plan nothing was compared"


async def test_out_of_memory_rules_out_what_needs_as_much(socket_path: Path) -> None:
    plans = [p for p in laptop_plans() if p.context == on_laptop().best.context]
    (room,) = {round(p.placement.shares[0].memory.total) - 400 for p in plans if p.key == on_laptop().best.key}

    def knobs(plan: Plan) -> tuple[str, ...]:
        lacking = plan.placement.shares[0].memory.total - room
        words = NO_MEMORY.format(mib=lacking)
        return ("--error-line", words, "--die-before-ready", "1") if lacking > 0 else ()

    bench = Bench(socket_path, lambda plan: 10.0 + plan.placement.cpu_expert_layers, knobs=knobs)
    tuned = await bench.tune(on_laptop(), plans)
    (first, *_) = failed = [m for m in bench.done if m.error]
    assert first.key == on_laptop().best.key
    assert first.lacking_device == "CUDA0"
    assert first.lacking_mib == pytest.approx(400, abs=1)
    by_key = {p.key: p for p in plans}
    need = {p.key: p.placement.shares[0].memory.total for p in plans}
    at = bench.started.index(first.key)
    for key in bench.started[at + 1 :]:
        assert need[key] < need[first.key] - 399 or launch_of(by_key[key]).ubatch < launch_of(by_key[first.key]).ubatch
    assert need[tuned.plan.key] <= room
    assert len(failed) < sum(need[key] > room for key in need), "not each of them had to fail"
    assert "cudaMalloc failed: out of memory" in (first.error or "")


@pytest.mark.parametrize("words", ["error: something that nobody has seen before", "CUDA error: misaligned address"])
async def test_a_plan_that_fails_is_none_and_the_others_go_on(socket_path: Path, words: str) -> None:
    bad = on_cpu().best.key
    died = ("--die-before-ready", "1", "--error-line", words)
    bench = Bench(socket_path, knobs=lambda plan: died if plan.key == bad else ())
    tuned = await bench.tune(on_cpu(), few())
    assert bench.started.count(bad) == 1
    assert tuned.plan.key != bad
    assert bad not in {plan.key for plan in tuned.plans}
    (failed,) = [m for m in tuned.measurements if m.error]
    assert failed.key == bad
    assert failed.seconds > 0


async def test_when_every_plan_fails_the_first_error_is_raised(socket_path: Path) -> None:
    seen: list[str] = []

    def knobs(plan: Plan) -> tuple[str, ...]:
        seen.append(plan.key)
        mib = 100.0 + len(seen)
        return ("--die-before-ready", "1", "--error-line", NO_MEMORY.format(mib=mib))

    bench = Bench(socket_path, knobs=knobs)
    with pytest.raises(EngineGpuMemoryError) as caught:
        await bench.tune(on_cpu(), few())
    assert caught.value.needed_mib == 101.0
    assert len(bench.started) == len(few()) == len(set(bench.started))
    assert all(m.error for m in bench.done)


async def test_a_refused_argument_ends_it_at_once(socket_path: Path) -> None:
    refuses = ("--die-before-ready", "1", "--error-line", "error: invalid argument: --ubatch-sise")
    bench = Bench(socket_path, knobs=lambda plan: refuses)
    with pytest.raises(EngineArgumentsError):
        await bench.tune(on_cpu(), few())
    assert len(bench.started) == 1


async def test_interrupted_it_goes_on_and_repeats_nothing(socket_path: Path) -> None:
    def speed(plan: Plan) -> float:
        return 10.0 if launch_of(plan).threads == 4 else 14.0

    whole = Bench(socket_path, speed)
    tuned = await whole.tune(on_cpu(), few())
    begun = whole.done[:2]
    rest = Bench(socket_path, speed)
    again = await rest.tune(on_cpu(), few(), kept=begun)
    assert again.plan.key == tuned.plan.key
    assert again.measurements == (*begun, *rest.done)
    looks = [(m.key, m.is_long) for m in begun]
    assert not [m for m in rest.done if (m.key, m.is_long) in looks and m.key != tuned.plan.key]
    assert len(rest.started) < len(whole.started)
    ended = Bench(socket_path, speed)
    at_once = await ended.tune(on_cpu(), few(), kept=whole.done)
    assert ended.started == []
    assert (at_once.plan.key, at_once.job_s) == (tuned.plan.key, tuned.job_s)


async def test_what_an_interrupted_tuning_has_spent_is_not_there_again(socket_path: Path) -> None:
    """A tuning that is broken off again and again would otherwise go on as long as there are plans."""
    whole = Bench(socket_path)
    await whole.tune(on_cpu(), few())
    (first, *_) = whole.done
    rest = Bench(socket_path)
    tuned = await rest.tune(on_cpu(), few(), budget_s=100.0, kept=[replace(first, seconds=99.9)])
    assert rest.started == []
    assert tuned.stopped_by == "budget"
    assert tuned.plan.key == first.key


async def test_an_interrupted_tuning_whose_first_plan_is_not_possible_any_more_keeps_its_depths(
    socket_path: Path,
) -> None:
    """After a restart the largest context that fits has another size. The earlier one was measured at all depths."""
    first = Bench(socket_path)
    await first.tune(on_cpu(), few())
    deepest = next(m.points[-1].depth for m in first.done if len(m.points) == 3)
    kept = [m for m in first.done if len(m.points) == 2 or m is first.done[0]]
    bench = Bench(socket_path)
    tuned = await bench.tune(on_cpu(), [p for p in few() if p.key != first.done[0].key], kept=kept)
    assert max(point.depth for m in bench.done for point in m.points) == deepest
    assert tuned.plan.key != first.done[0].key


async def test_of_an_interrupted_tuning_in_which_all_failed_nothing_is_kept(socket_path: Path) -> None:
    kept = [Measurement(key=plan.key, error="engine exited with code 1") for plan in few()]
    unknown = Measurement(key="of another start", error="engine exited with code 1")
    bench = Bench(socket_path)
    tuned = await bench.tune(on_cpu(), few(), kept=[*kept, unknown])
    assert tuned.measurements == tuple(bench.done)
    broken = Bench(socket_path, knobs=lambda plan: ("--die-before-ready", "1"))
    with pytest.raises(EngineNotReadyError):
        await broken.tune(on_cpu(), few(), kept=kept)


async def test_when_the_budget_is_used_up_the_best_so_far_is_taken(socket_path: Path) -> None:
    bench = Bench(socket_path, knobs=lambda plan: ("--load-seconds", "2"))
    tuned = await bench.tune(on_cpu(), few(), budget_s=2.0)
    assert tuned.stopped_by == "budget"
    assert bench.started == [on_cpu().best.key] == [tuned.plan.key]
    assert tuned.seconds >= 2.0


def contexts() -> dict[int, Plan]:
    """Return the plan that is predicted to be the fastest for each context length."""
    found: dict[int, Plan] = {}
    for plan in sorted(laptop_plans(), key=lambda plan: plan.speed.job_s if plan.speed else 0.0):
        found.setdefault(plan.context, plan)
    return found


async def test_balanced_serves_the_largest_window_that_keeps_its_share_of_speed(socket_path: Path) -> None:
    plans = contexts()
    sizes = sorted(plans)
    assert len(sizes) >= 4
    kept = sizes[-2]
    bench = Bench(socket_path, lambda plan: 10.0 if plan.context <= kept else 20.0)
    tuned = await bench.tune(on_laptop(), list(plans.values()))
    assert tuned.plan.context == kept
    assert {plan.context for plan in tuned.plans} >= {kept, sizes[-1]}, "the next larger was measured"
    fastest = Bench(socket_path, lambda plan: 10.0 * 1.5 ** sizes.index(plan.context))
    tuned = await fastest.tune(on_laptop(), list(plans.values()))
    assert tuned.plan.context == sizes[0]


async def test_for_context_the_window_is_as_large_as_can_be_read_along_with(socket_path: Path) -> None:
    """If the whole context is too slow when full, the same plan is measured with a part of it."""
    best = on_cpu().best
    assert best.context == 16384
    # 10 ms and 10 more with every 2,048 tokens: 15 tok/s are 66.7 ms, reached at 11,600; 7 % faster at 10,775.
    bench = Bench(socket_path, lambda plan: 10.0)
    tuned = await bench.tune(on_cpu(), [best], mode="context")
    assert tuned.plan.context == 10752
    assert set(bench.started) == {best.key, tuned.plan.key}
    assert {plan.context for plan in tuned.plans} == {10752, 16384}
    words = {c.name: c for c in tuned.plan.choices}
    assert words["context"].value == "10,752"
    assert tuned.chosen.why.startswith("the largest context that decodes 15 tok/s when full")
    assert tuned.allocated == next(m.allocated for m in bench.done if m.key == tuned.plan.key)
    assert on_cpu().now(tuned.plan) == tuned.plan


def few_experts_are_fast(plan: Plan) -> float:
    """Return ms a token: more for a larger context, which leaves more experts in host memory. All are fast enough to
    read along."""
    return 0.02 * plan.placement.cpu_expert_layers


async def measured_for_speed(socket_path: Path) -> tuple[list[Plan], tuple[Measurement, ...]]:
    """Return one plan for each context length, and the measurements of the smallest one's."""
    plans = sorted(contexts().values(), key=lambda plan: plan.context)
    tuned = await Bench(socket_path, few_experts_are_fast).tune(on_laptop(), plans[:1], mode="speed")
    return plans, tuned.measurements


@pytest.mark.parametrize("mode", ["balanced", "context"])
async def test_another_mode_has_two_more_plans_measured_and_what_was_measured_stays(
    socket_path: Path, mode: Mode
) -> None:
    plans, kept = await measured_for_speed(socket_path)
    assert len(plans) >= 4
    bench = Bench(socket_path, few_experts_are_fast if mode == "context" else lambda plan: 0.1)
    seen = await bench.widen(on_laptop(), plans, mode=mode, kept=kept)
    assert len(bench.started) == len(set(bench.started)) == 2
    assert {plan.key for plan in seen} == {plans[0].key, *bench.started}
    contexts = {plan.key: plan.context for plan in plans}
    first, second = (contexts[key] for key in bench.started)
    assert contexts[plans[0].key] < first < second, "each holds, so a larger one is next"
    assert [len(m.points) for m in bench.done] == [3 if mode == "context" else 2] * 2


async def test_a_window_that_does_not_hold_is_followed_by_a_smaller_one(socket_path: Path) -> None:
    plans, kept = await measured_for_speed(socket_path)
    contexts = {plan.key: plan.context for plan in plans}
    slow = Bench(socket_path, lambda plan: 500.0)
    await slow.widen(on_laptop(), plans, mode="context", kept=kept)
    first, second = (contexts[key] for key in slow.started)
    assert first > second
    failing = Bench(socket_path, knobs=lambda plan: ("--die-before-ready", "1"))
    seen = await failing.widen(on_laptop(), plans, mode="context", kept=kept)
    assert [contexts[key] for key in failing.started] == [first, second]
    assert [plan.key for plan in seen] == [plans[0].key]


async def test_what_no_prediction_can_tell_from_a_measured_plan_is_measured_all_the_same(socket_path: Path) -> None:
    here = on_laptop()
    (best, *_) = plans = [here.best, *filter(None, (here.at_context(here.best, size) for size in (8192, 16384)))]
    assert len({here.costs(plan) for plan in plans}) == 1
    bench = Bench(socket_path)
    small = await bench.tune(here, plans[1:2], mode="speed")
    assert best.context > 16384
    seen = await bench.widen(here, plans, mode="balanced", kept=small.measurements)
    assert {plan.key for plan in seen} == {best.key, plans[1].key}


async def test_where_nothing_more_is_wanted_or_there_is_no_time_nothing_is_started(socket_path: Path) -> None:
    plans, kept = await measured_for_speed(socket_path)
    bench = Bench(socket_path, few_experts_are_fast)
    assert [plan.key for plan in await bench.widen(on_laptop(), plans, mode="speed", kept=kept)] == [plans[0].key]
    assert await bench.widen(on_laptop(), plans[:1], mode="context", kept=kept)
    assert await bench.widen(on_laptop(), plans, mode="context", kept=kept, budget_s=0.001)
    assert bench.started == []


async def test_where_the_time_was_up_every_mode_takes_what_was_measured(socket_path: Path) -> None:
    plans, kept = await measured_for_speed(socket_path)
    bench = Bench(socket_path, few_experts_are_fast)
    tuned = await bench.tune(on_laptop(), plans, mode="context", budget_s=0.001, kept=kept)
    assert bench.started == []
    assert tuned.plan.key == plans[0].key
    assert tuned.measurements == kept


async def test_a_window_that_memory_was_seen_not_to_hold_is_not_tried(socket_path: Path) -> None:
    plans, kept = await measured_for_speed(socket_path)
    failed = Measurement(key=plans[1].key, error="out of memory", lacking_device="CUDA0", lacking_mib=1.0)
    need = {plan.key: plan.placement.shares[0].memory.total for plan in plans}
    untold, told = (Bench(socket_path, few_experts_are_fast) for _ in range(2))
    await untold.widen(on_laptop(), plans, mode="context", kept=kept)
    await told.widen(on_laptop(), plans, mode="context", kept=(*kept, failed))
    assert any(need[key] >= need[failed.key] for key in untold.started)
    assert not any(need[key] >= need[failed.key] for key in told.started)


async def test_what_was_disturbed_is_measured_once_more_and_a_calm_look_counts(socket_path: Path) -> None:
    bench = Bench(socket_path)
    bench.disturbed = 1
    tuned = await bench.tune(on_cpu(), [on_cpu().best])
    first, second, *_ = bench.done
    assert "the hypervisor took" in (first.disturbance or "")
    assert second.key == first.key
    assert second.disturbance is None
    assert tuned.disturbance is None


async def test_where_everything_was_disturbed_the_result_says_so(socket_path: Path) -> None:
    bench = Bench(socket_path)
    bench.disturbed = 100
    tuned = await bench.tune(on_cpu(), [on_cpu().best])
    assert tuned.disturbance == bench.done[-1].disturbance
    assert "the hypervisor took" in (tuned.disturbance or "")


async def test_an_engine_that_does_no_work_is_an_error_of_its_own(socket_path: Path) -> None:
    bench = Bench(socket_path, knobs=lambda plan: ("--die-on-request",))
    with pytest.raises(EngineError, match="exited with code 1"):
        await bench.tune(on_cpu(), [on_cpu().best])


async def test_a_first_look_at_an_engine_that_spins_ends(socket_path: Path) -> None:
    """The engine uses a core and never ends, which no stall timer sees."""
    bench = Bench(socket_path, knobs=lambda plan: ("--works-s", "inf"))
    look = FirstSampling(wanted=640, work_s=1.0, deep_s=1.0, most_s=0.5)
    watch = partial(Watch, bench.hardware, {}, sample=bench.sample)
    with pytest.raises(EngineNotReadyError, match=r"did not end within 0\.5 s while it was measured"):
        await measure(on_cpu().best, look, bench=bench_of(bench.start), on_step=bench.tell, watch=watch)


@pytest.mark.parametrize(("budget_s", "most_s"), [(5.0, 600.0), (300.0, 3000.0)])
async def test_a_first_look_has_ten_budgets_and_ten_minutes_at_least(budget_s: float, most_s: float) -> None:
    looks: list[Sampling | FirstSampling] = []

    async def take(plan: Plan, look: Sampling | FirstSampling) -> Measurement:
        looks.append(look)
        message = "none is taken"
        raise EngineArgumentsError(message)

    here = on_cpu()
    goal = Goal(mix=parse_mix("chat"), mode="balanced", native=here.native)
    with pytest.raises(EngineArgumentsError):
        await Tuner(here, [here.best], take, goal, budget_s=budget_s, on_result=lambda _: None).run()
    (look,) = looks
    assert isinstance(look, FirstSampling)
    assert look.most_s == most_s


async def test_on_a_slow_machine_the_first_look_leaves_time_for_others(socket_path: Path) -> None:
    """24 tokens at each depth would take 24 s, of 20 s."""
    bench = Bench(socket_path, lambda plan: 1000.0)
    await bench.tune(on_cpu(), few(), budget_s=20.0)
    assert [point.depth for point in bench.done[0].points] == [32]
