"""The plans that are measured against the prediction. They differ in KV cache type, context length, ubatch, threads,
load mode, and in the number of layers whose experts lie in host memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.arguments.launch import ExpertSlots, launch_of
from appliance.engines.llama.planning.arguments.numa import Numa, numa_modes
from appliance.engines.llama.planning.expert_slots import NAME
from appliance.engines.llama.planning.host_memory import host_memory
from appliance.engines.llama.planning.inputs import (
    PlanInputs,
    offered_kinds,
    usual_ubatch,
)
from appliance.engines.llama.planning.memory.memory import UBATCH, padded
from appliance.engines.llama.planning.placement.batch import BATCH, UBATCHES_GPU, predicted_speed
from appliance.engines.llama.planning.placement.context import TOO_LONG, ContextPlan
from appliance.engines.llama.planning.placement.intervals import with_intervals
from appliance.engines.llama.planning.placement.placement import Placed, place
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR, teams
from appliance.engines.llama.planning.placement.tensor_placement import cards_of, place_tensors
from appliance.engines.llama.planning.replan import with_caches
from appliance.engines.llama.planning.threads import cpus_of, thread_counts
from appliance.plan import (
    CONTEXT_STEP,
    SMALLEST_CONTEXT,
    Costs,
    Device,
    Plan,
    with_launch,
)

UBATCHES = (128, 256, 512, 1024)
EXPERTS_AROUND = (-1, 1, 2, 4)  # added to the predicted number of layers whose experts lie in host memory


class Variations:
    """Plans like `best`, the prediction for `inputs`, with other values of the knobs.

    `costs_of` returns a plan's costs with as many threads as compute most.
    """

    def __init__(
        self, inputs: PlanInputs, best: Plan, context_plan: ContextPlan, costs_of: Callable[[Plan], Costs]
    ) -> None:
        self._inputs = inputs
        self.best = best
        self._context_plan = context_plan
        self._costs_of = costs_of

    def all(self) -> Iterator[Plan]:
        """Yield all variations, also those that do not fit into host memory. With GPUs there are thousands."""
        for placed in (*self._placements(), *self._usual_knees()):
            yield from self.around(placed)

    def _placements(self) -> Iterator[Plan]:
        """Yield a plan for each KV cache type, context length, ubatch, and number of layers with experts on the host.

        In split mode tensor there is one for each team of cards too.
        """
        for kv_type in offered_kinds(self._inputs):
            for context in self._contexts(kv_type):
                context_plan = replace(self._context_plan, kv_type=kv_type, context=context)
                for ubatch in self._ubatches():
                    if ubatch > padded(context):
                        continue
                    placed = _again(self._inputs, context_plan, ubatch=ubatch)
                    in_parallel = tensor_placements(self._inputs, context_plan, self._teams, ubatch=ubatch)
                    for each in (placed, *self._more_experts(context_plan, ubatch, placed), *in_parallel):
                        if each:
                            yield self.at(each, context_plan, ubatch=ubatch)

    @cached_property
    def _teams(self) -> tuple[tuple[Device, ...], ...]:
        """Teams of cards for split mode tensor, one of each size, because plan keys tell only sizes apart.

        The team of the prediction's size is the prediction's own.
        """
        devices, best = self._inputs.resources.devices, self.best.placement
        own = cards_of(best, devices) if best.split_mode == TENSOR else ()
        return tuple(own if len(own) == len(team) else team for team in teams(devices))

    def _usual_knees(self) -> Iterator[Plan]:
        """Yield the largest contexts that the default ubatch keeps on GPUs, if the prediction has another ubatch."""
        if self._inputs.settings.ctx_size:
            return
        for kv_type, knee in self._context_plan.usual_knees.items():
            context = min(knee, self._inputs.native)
            if context >= self._least:
                context_plan = replace(self._context_plan, kv_type=kv_type, context=context)
                if placed := _again(self._inputs, context_plan, ubatch=UBATCH):
                    yield self.at(placed, context_plan, ubatch=UBATCH)

    def _ubatches(self) -> tuple[int, ...]:
        settings, model = self._inputs.settings, self._inputs.model
        if settings.ubatch or model.reads_whole:  # a model that reads whole takes shorter texts with a smaller one
            return (usual_ubatch(settings, model),)
        sizes = (256, *UBATCHES_GPU) if self._inputs.resources.devices else UBATCHES
        if self.best.placement.copies_weights or launch_of(self.best).ubatch > UBATCH:
            # A smaller ubatch is slower with long prompts only, and measuring uses short ones: it would look as good.
            return tuple(size for size in sizes if size >= launch_of(self.best).ubatch)
        return tuple(dict.fromkeys((UBATCH, *sizes)))

    def _more_experts(self, context_plan: ContextPlan, ubatch: int, placed: Placed | None) -> Iterator[Placed | None]:
        if placed and placed.placement.cpu_expert_layers and self._inputs.settings.n_cpu_moe is None:
            for more in EXPERTS_AROUND:
                experts = placed.placement.cpu_expert_layers + more
                yield _again(self._inputs, context_plan, ubatch=ubatch, experts=experts)

    def _contexts(self, kv_type: str) -> tuple[int, ...]:
        """Return the context lengths to try with this KV cache type, the largest first; empty if none is usable.

        They are the largest that fits, the one the mode pays for, the largest with everything on GPUs, the predicted
        one, and powers of two below. Without a GPU only the largest: there a smaller one is no faster near empty.
        """
        settings, best = self._inputs.settings, self.best
        if settings.ctx_size:
            return (best.context,)
        carried, knee = (of.get(kv_type, 0) for of in (self._context_plan.carried, self._context_plan.knees))
        largest = max(carried, knee, best.context if kv_type == best.kv_type else 0)
        if not largest:
            return ()
        has_gpu = bool(self._inputs.resources.devices)
        is_hurried = self._context_plan.bound == TOO_LONG  # --fill-minutes ended it: a larger one must not be served
        widest = self._widest(kv_type, largest) if has_gpu and not is_hurried else largest
        least = self._least
        if not has_gpu:
            return (widest,) if widest >= least else ()
        below = (SMALLEST_CONTEXT << at for at in range(12))
        of_best = {best.context} if widest >= best.context else set()
        sizes = {widest, largest, *of_best, *({knee} if knee else ()), *(size for size in below if size < widest)}
        return tuple(sorted((size for size in sizes if size >= least), reverse=True))

    @property
    def _least(self) -> int:
        """The smallest context length that any mode serves."""
        return min(self._inputs.native, SMALLEST_CONTEXT, self.best.context)

    def _widest(self, kv_type: str, carried: int) -> int:
        """Return the largest context that can be placed at all, at any speed. Found by halving."""
        low, high = carried // CONTEXT_STEP, padded(self._inputs.native) // CONTEXT_STEP
        while low < high:
            middle = (low + high + 1) // 2
            context_plan = replace(self._context_plan, kv_type=kv_type, context=middle * CONTEXT_STEP)
            low, high = (middle, high) if _again(self._inputs, context_plan, ubatch=UBATCH) else (low, middle - 1)
        return low * CONTEXT_STEP

    def with_slots(self, placed: Placed, slots: ExpertSlots) -> Plan:
        """Return the prediction with its experts in host memory and slots for them, which `placed` has room for."""
        plan = with_launch(self.at(placed, self._context_plan, ubatch=launch_of(self.best).ubatch), slots=slots)
        if not self._inputs.settings.is_set(NAME):
            plan = _reworded(plan, moe_slots=(str(slots.count), _why_beside(asked=False)))
        return self.loaded(plan, launch_of(plan).load_mode)

    def around(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with each load mode, NUMA mode and number of threads that is worth measuring."""
        inputs, placement = self._inputs, plan.placement
        works_on_cpu = not placement.is_whole
        counts = self._thread_counts() if works_on_cpu else (launch_of(plan).threads,)
        modes = [launch_of(plan).load_mode]
        if works_on_cpu and inputs.settings.load_mode == "auto" and plan.memory.total <= plan.usable_mib:
            modes = list(dict.fromkeys((*modes, "none", "mmap")))
        host_mib = plan.memory.weights
        for mode in modes:
            loaded = self.loaded(plan, mode)
            for numa in numa_modes(inputs.settings, inputs.engine, inputs.hardware, placement, host_mib):
                for threads in dict.fromkeys(min(count, numa.threads_max or count) for count in counts):
                    cpus = cpus_of(inputs.hardware.cpu, inputs.engine, numa, placement, threads)
                    yield _with_numa(with_thread_count(loaded, threads), numa, cpus)

    def _thread_counts(self) -> tuple[int, ...]:
        """Return the numbers of threads to try: the prediction's candidates, and its first plus and minus one."""
        counts, _ = thread_counts(self._inputs.settings, self._inputs.hardware.cpu, self._inputs.resources.cpu)
        if self._inputs.settings.threads:
            return counts
        most = self._inputs.hardware.cpu.threads_max
        return tuple(dict.fromkeys((*counts, max(1, counts[0] - 1), min(most, counts[0] + 1))))

    def at(self, placed: Placed, context_plan: ContextPlan, *, ubatch: int) -> Plan:
        """Return the prediction with another placement, context and ubatch, and with caches of the size that fits."""
        plan = _with(self._inputs, self.best, placed, ubatch=ubatch)
        plan = self.loaded(plan, self._usual_mode(plan))
        is_as_before = where(plan) == where(self.best)
        if is_as_before and (context_plan.context, context_plan.kv_type) == (plan.context, plan.kv_type):
            return with_caches(self._inputs, plan) or plan
        words = {
            "context": (f"{context_plan.context:,}", _why_beside(asked=self._inputs.settings.ctx_size is not None)),
            "kv_type": (context_plan.kv_type, _why_beside(asked=self._inputs.settings.kv_type != "auto")),
            "split": (plan.placement.split_mode, _why_beside(asked=False)),
        }
        plan = replace(_reworded(plan, **words), context=context_plan.context, kv_type=context_plan.kv_type)
        return with_caches(self._inputs, plan) or plan

    def _usual_mode(self, plan: Plan) -> str:
        """Return the prediction's load mode; mmap instead of none if this plan copies no weights to a GPU.

        Mode none pins weights, which only makes copies faster.
        """
        mode = launch_of(self.best).load_mode
        is_pinned = self._inputs.settings.load_mode == "auto" and mode == "none"
        return "mmap" if is_pinned and not plan.placement.copies_weights else mode

    def loaded(self, plan: Plan, mode: str) -> Plan:
        """Return the plan with this load mode, and with the speed and the reasons that follow from the mode."""
        launch, inputs = launch_of(plan), self._inputs
        if mode != launch.load_mode:
            why = "pages of the file, shared and dropped under pressure; measured beside others"
            if mode != "mmap":
                why = "weights are loaded, not mapped: for a GPU they are pinned; measured beside mmap"
            memory = host_memory(inputs, plan.memory, mode, bool(plan.placement.shares))
            memory = replace(plan.memory, mapped_twice=memory.mapped_twice)
            plan = _reworded(with_launch(replace(plan, memory=memory), load_mode=mode), load_mode=(mode, why))
        if not plan.speed:
            return plan
        speed = predicted_speed(plan.placement, plan.speed, self._costs_of(plan), inputs.settings, inputs.model)
        if launch_of(plan).slots:  # nothing was published of such plans
            speed = replace(speed, decode_interval=None, prefill_interval=None)
        where = reasons.placement(plan.placement, speed, inputs.resources, inputs.settings)
        told = {each.name: each for each in (where, reasons.speed(speed, plan.placement, inputs.resources))}
        choices = tuple(told.get(choice.name, choice) for choice in plan.choices)
        return replace(plan, speed=speed, choices=choices)


def with_thread_count(plan: Plan, threads: int) -> Plan:
    is_same = threads == launch_of(plan).threads
    return plan if is_same else with_launch(plan, threads=threads, threads_batch=threads)


def _with_numa(plan: Plan, numa: Numa, cpus: tuple[int, ...]) -> Plan:
    if (numa.mode, cpus) == (launch_of(plan).numa, launch_of(plan).cpus):
        return plan
    plan = with_launch(plan, numa=numa.mode, cpus=cpus)
    kept = tuple(choice for choice in plan.choices if choice.name != "numa")
    return replace(plan, choices=(*kept, numa.choice) if numa.choice else kept)


def where(plan: Plan) -> tuple[str, ...]:
    """Return the placement with the cards' ids. The engine numbers only the cards in use, so names do not tell them."""
    return (plan.placement.summary(), *(share.gpu.id for share in plan.placement.shares))


def _why_beside(*, asked: bool) -> str:
    """Return the short reason for a variation. Reasons with prices hold for the prediction's placement only."""
    return "asked for" if asked else "measured beside others"


def _reworded(plan: Plan, **words: tuple[str, str]) -> Plan:
    """Return the plan with other values and reasons for some choices: `words` is (value, reason) by name."""
    choices = tuple(
        replace(choice, value=words[choice.name][0], reason=words[choice.name][1]) if choice.name in words else choice
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def tensor_placements(
    inputs: PlanInputs, context_plan: ContextPlan, cards: Iterable[tuple[Device, ...]], *, ubatch: int
) -> tuple[Placed, ...]:
    job = replace(inputs.job, context=padded(context_plan.context), kv_type=context_plan.kv_type, ubatch=ubatch)
    return place_tensors(job, inputs.resources, inputs.engine.split_modes, cards)


def _again(inputs: PlanInputs, context_plan: ContextPlan, *, ubatch: int, experts: int | None = None) -> Placed | None:
    if experts is not None and experts < 0:
        return None
    job = replace(inputs.job, context=padded(context_plan.context), kv_type=context_plan.kv_type, ubatch=ubatch)
    return place(job if experts is None else replace(job, cpu_expert_layers=experts), inputs.resources)


def _with(inputs: PlanInputs, best: Plan, placed: Placed, *, ubatch: int) -> Plan:
    launch = launch_of(best)
    host = host_memory(inputs, placed.host, launch.load_mode, bool(placed.placement.shares))
    host = replace(host, cache=best.memory.cache, checkpoints=best.memory.checkpoints)
    words = {} if ubatch == launch.ubatch else {"ubatch": (str(ubatch), f"measured beside {launch.ubatch}")}
    return replace(
        _reworded(best, **words),
        launch=replace(launch, ubatch=ubatch, batch=max(BATCH, ubatch)),
        memory=host,
        placement=placed.placement,
        speed=with_intervals(placed.speed, placed.placement, inputs.model),
    )
