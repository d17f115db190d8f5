"""All plans of one start: the predicted one, every other that fits, and the plans of an earlier start within the memory
that is free now. Pure; computed when asked for, since a start from a profile needs only the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from appliance.engines.engine import Reduced
from appliance.engines.llama.planning import reasons
from appliance.engines.llama.planning.batch import BATCH, PINNED, UBATCHES_GPU, predicted_speed
from appliance.engines.llama.planning.context import AS_WHOLE, NO_FIT, ContextPlan, choose_context, enough_of
from appliance.engines.llama.planning.decide import (
    PlanInputs,
    aim_of,
    check,
    context_for,
    host_memory,
    offered_kinds,
    plan_inputs,
    predicted,
    thread_counts,
    usual_ubatch,
    wanted_context,
    with_less,
)
from appliance.engines.llama.planning.job_time import decode_ms, placement_costs
from appliance.engines.llama.planning.kv_types import unjudged, worth_checking
from appliance.engines.llama.planning.launch import KNOB_EFFECTS, launch_of, with_launch
from appliance.engines.llama.planning.limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.memory import UBATCH, padded
from appliance.engines.llama.planning.mixture import modelled
from appliance.engines.llama.planning.now import plan_now, with_caches
from appliance.engines.llama.planning.numa import Numa, numa_modes
from appliance.engines.llama.planning.placement import Placed, place
from appliance.engines.llama.planning.roofline import with_threads
from appliance.engines.llama.planning.shortage import missing, taken_mib
from appliance.engines.llama.planning.speculation import applied, as_asked, estimate, kinds, still_applied
from appliance.engines.llama.planning.tensor_mode import CLEARLY, TENSOR, TRUSTED, has_good_links
from appliance.engines.llama.planning.tensor_placement import place_same, place_tensors
from appliance.errors import ModelDoesNotFitError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import (
    CONTEXT_STEP,
    SMALLEST_CONTEXT,
    Allocated,
    Choice,
    Costs,
    Kernels,
    Kind,
    KnobEffect,
    KvCheck,
    Offer,
    Plan,
    Shortage,
    Speculation,
)
from appliance.probe import Hardware
from appliance.settings import Settings

UBATCHES = (128, 256, 512, 1024)
EXPERTS_AROUND = (-1, 1, 2, 4)  # layers whose experts stay in host memory, more or fewer than predicted


class Space:
    """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""

    def __init__(
        self,
        settings: Settings,
        image: ImageFacts,
        engine: EngineFacts,
        hardware: Hardware,
        model: Model,
        *,
        kv_checks: Sequence[KvCheck] = (),
        kernels: Kernels | None = None,
        draft: Model | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """`kv_checks` are on types of the cache below q8_0: none is in the space without one that accepts it.
        `kernels` as for `plan_inputs`; `draft` is the model that makes draft tokens, if one is given."""
        check(settings, engine, model)
        facts = (settings, image, engine, hardware, model)
        self._with_limits = partial(Space, *facts, kv_checks=kv_checks, kernels=kernels, draft=draft)
        inputs = plan_inputs(*facts, kernels, limits)
        self._given = replace(inputs, kv_checks=tuple(kv_checks))
        self._image = image
        self._draft = draft
        self._aim = aim_of(settings)
        self._costs: dict[tuple[object, ...], Costs] = {}

    @cached_property
    def _decided(self) -> tuple[PlanInputs, ContextPlan]:
        """With as much beside the model as fits."""
        refusal: ModelDoesNotFitError | None = None
        for inputs in with_less(self._given):
            try:
                return inputs, context_for(inputs, self._aim)
            except ModelDoesNotFitError as error:
                refusal = error  # the last says what is needed at least
        raise refusal or AssertionError

    @property
    def _inputs(self) -> PlanInputs:
        return self._decided[0]

    @property
    def context_plan(self) -> ContextPlan:
        return self._decided[1]

    @cached_property
    def best(self) -> Plan:
        """The prediction."""
        in_parallel = _in_parallel(self._inputs, self.context_plan)
        return predicted(self._inputs, self._image, in_parallel or self.context_plan)

    @property
    def predicted(self) -> Plan:
        """The best, with the kind of speculative decoding that was asked for.

        Raises ModelDoesNotFitError where that has no room.
        """
        inputs = self._inputs
        return as_asked(self.best, inputs.settings, model=inputs.model, draft=self._draft, isa=inputs.kernels.isa)

    def offers(self) -> tuple[Offer, ...]:
        """Every kind of speculative decoding, the likeliest first. Raises ConfigError for one that was asked for and
        cannot be done."""
        return kinds(self._given.settings, self._given.model, self._given.engine, self._draft)

    def speculation(self, plan: Plan, kind: Kind, tokens: int) -> Speculation:
        """What it adds to the plan."""
        inputs = self._given
        return estimate(plan, kind, tokens, model=inputs.model, draft=self._draft, isa=inputs.kernels.isa)

    def speculating(self, plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
        """Raises ModelDoesNotFitError where there is no room."""
        return applied(plan, speculation, choice)

    def speculating_as(self, plan: Plan, measured: Plan) -> Plan:
        """As a plan that was measured, where it was for the same context and there still is room."""
        return still_applied(plan, measured, draft_path=str(self._draft.path) if self._draft else None)

    @property
    def native(self) -> int:
        """The model's own context length, or the one that was asked for."""
        return self._given.settings.ctx_size or self._given.model.native_context

    def kinds_to_check(self) -> tuple[str, ...]:
        """Types of the KV cache that would carry a much larger context, if they were shown to be harmless; what helps
        most first. The best plan that is possible already is what they are checked with."""
        inputs = self._given
        request = wanted_context(inputs, self._aim)
        on_gpu = bool(inputs.resources.devices)
        more = unjudged(inputs.settings, inputs.engine, inputs.model, inputs.kv_checks, on_gpu=on_gpu)
        # From disk every context would fit.
        if not more or inputs.settings.allow_disk or inputs.model.is_embedding_model:
            return ()
        context_plan = choose_context(inputs.job, inputs.resources, replace(request, kinds=(*request.kinds, *more)))
        return worth_checking(context_plan.carried, enough=enough_of(request)) if context_plan else ()

    def all(self) -> list[Plan]:
        """Every plan that fits, the best first: each KV type, context, ubatch, number of threads, way to load,
        and some more or fewer experts in host memory. Thousands where there are GPUs."""
        best = self.best
        room = float("inf") if self._inputs.settings.allow_disk else max(best.usable_mib, best.memory.total)
        found: dict[str, Plan] = {}
        for plan in (best, *(each for placed in self._placements() for each in self._around(placed))):
            if plan.memory.total <= room:
                found.setdefault(plan.key, plan)
        return list(found.values())

    def _placements(self) -> Iterator[Plan]:
        """One for each type of the cache, context, ubatch and number of experts in host memory."""
        for kv_type in offered_kinds(self._inputs):
            for context in self._contexts(kv_type):
                context_plan = replace(self.context_plan, kv_type=kv_type, context=context)
                for ubatch in self._ubatches():
                    if ubatch > padded(context):
                        continue
                    placed = _again(self._inputs, context_plan, ubatch=ubatch)
                    split = _split(self._inputs, context_plan, ubatch=ubatch)
                    for each in (placed, *self._more_experts(context_plan, ubatch, placed), *split):
                        if each:
                            yield self._at(each, context_plan, ubatch=ubatch)

    def _ubatches(self) -> tuple[int, ...]:
        settings, model = self._inputs.settings, self._inputs.model
        if settings.ubatch or model.reads_whole:  # then no smaller one takes the same texts
            return (usual_ubatch(settings, model),)
        sizes = (256, *UBATCHES_GPU) if self._inputs.resources.devices else UBATCHES
        if self.best.placement.copies_weights:
            # What a smaller one costs shows in long prompts only, and those that are measured with are short.
            return tuple(size for size in sizes if size >= launch_of(self.best).ubatch)
        return tuple(dict.fromkeys((UBATCH, *sizes)))

    def _more_experts(self, context_plan: ContextPlan, ubatch: int, placed: Placed | None) -> Iterator[Placed | None]:
        if placed and placed.placement.cpu_expert_layers and self._inputs.settings.n_cpu_moe is None:
            for more in EXPERTS_AROUND:
                experts = placed.placement.cpu_expert_layers + more
                yield _again(self._inputs, context_plan, ubatch=ubatch, experts=experts)

    def _contexts(self, kv_type: str) -> tuple[int, ...]:
        """The largest that fits, that with everything on GPUs, that of the prediction, and powers of two below where a
        larger one costs something."""
        settings, best = self._inputs.settings, self.best
        if settings.ctx_size:
            return (best.context,)
        carried, knee = (of.get(kv_type, 0) for of in (self.context_plan.carried, self.context_plan.knees))
        largest = max(carried, knee, best.context if kv_type == best.kv_type else 0)
        if not largest:
            return ()
        has_gpu = bool(self._inputs.resources.devices)
        widest = self._widest(kv_type, largest) if has_gpu else largest
        least = min(self.native, SMALLEST_CONTEXT, best.context)  # no mode serves less
        if not has_gpu:
            return (widest,) if widest >= least else ()
        below = (SMALLEST_CONTEXT << at for at in range(12))
        of_best = {best.context} if widest >= best.context else set()
        sizes = {widest, largest, *of_best, *({knee} if knee else ()), *(size for size in below if size < widest)}
        return tuple(sorted((size for size in sizes if size >= least), reverse=True))

    def _widest(self, kv_type: str, carried: int) -> int:
        """The largest context that can be placed at all, whatever it costs, found by halving."""
        low, high = carried // CONTEXT_STEP, padded(self.native) // CONTEXT_STEP
        while low < high:
            middle = (low + high + 1) // 2
            context_plan = replace(self.context_plan, kv_type=kv_type, context=middle * CONTEXT_STEP)
            low, high = (middle, high) if _again(self._inputs, context_plan, ubatch=UBATCH) else (low, middle - 1)
        return low * CONTEXT_STEP

    def _around(self, plan: Plan) -> Iterator[Plan]:
        """With other threads, loaded otherwise."""
        inputs, placement = self._inputs, plan.placement
        works_on_cpu = not placement.is_whole
        counts = self._thread_counts() if works_on_cpu else (launch_of(plan).threads,)
        modes = [launch_of(plan).load_mode]
        if works_on_cpu and inputs.settings.load_mode == "auto" and plan.memory.total <= plan.usable_mib:
            modes = list(dict.fromkeys((*modes, "none", "mmap")))
        host_mib = plan.memory.weights
        for mode in modes:
            loaded = self._loaded(plan, mode)
            for numa in numa_modes(inputs.settings, inputs.engine, inputs.hardware, placement, host_mib):
                for threads in dict.fromkeys(min(count, numa.threads_max or count) for count in counts):
                    yield _with_numa(_with_threads(loaded, threads), numa)

    def _thread_counts(self) -> tuple[int, ...]:
        """Those of a prediction, and one more and one fewer than the cores."""
        counts, _ = thread_counts(self._inputs.settings, self._inputs.hardware)
        if self._inputs.settings.threads:
            return counts
        most = self._inputs.hardware.cpu.threads_max
        return tuple(dict.fromkeys((*counts, max(1, counts[0] - 1), min(most, counts[0] + 1))))

    def _at(self, placed: Placed, context_plan: ContextPlan, *, ubatch: int) -> Plan:
        """The best with another placement, context and ubatch, and with the caches that it leaves room for."""
        plan = _with(self._inputs, self.best, placed, ubatch=ubatch)
        plan = self._loaded(plan, self._usual_mode(plan))
        is_as_before = _where(plan) == _where(self.best)
        if is_as_before and (context_plan.context, context_plan.kv_type) == (plan.context, plan.kv_type):
            return with_caches(self._inputs, plan) or plan
        words = {
            "context": (f"{context_plan.context:,}", _why_beside(asked=self._inputs.settings.ctx_size is not None)),
            "kv_type": (context_plan.kv_type, _why_beside(asked=self._inputs.settings.kv_type != "auto")),
        }
        plan = replace(_reworded(plan, **words), context=context_plan.context, kv_type=context_plan.kv_type)
        return with_caches(self._inputs, plan) or plan

    def _usual_mode(self, plan: Plan) -> str:
        """That of the prediction; without weights to copy there is nothing to pin."""
        mode = launch_of(self.best).load_mode
        is_pinned = self._inputs.settings.load_mode == "auto" and mode == "none"
        return "mmap" if is_pinned and not plan.placement.copies_weights else mode

    def _loaded(self, plan: Plan, mode: str) -> Plan:
        """With the speed that it has so."""
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
        speed = predicted_speed(plan.placement, plan.speed, self._costs_of(plan), inputs.settings)
        where = reasons.placement(plan.placement, speed, inputs.resources, inputs.settings)
        told = {each.name: each for each in (where, reasons.speed(speed, plan.placement, inputs.resources))}
        choices = tuple(told.get(choice.name, choice) for choice in plan.choices)
        return replace(plan, speed=speed, choices=choices)

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        """The same plan with a smaller context; None where it cannot be placed again."""
        launch = launch_of(plan)
        context_plan = replace(self.context_plan, kv_type=plan.kv_type, context=context)
        job = replace(self._inputs.job, context=padded(context), kv_type=plan.kv_type, ubatch=launch.ubatch)
        if plan.placement.shares and plan.placement.split_mode != TENSOR:
            experts = plan.placement.cpu_expert_layers
            job = replace(job, gpu_layers=plan.placement.gpu_layers, cpu_expert_layers=experts)
        if plan.placement.split_mode == TENSOR:
            placed = place_same(job, self._inputs.resources, plan.placement, self._inputs.engine.split_modes)
        else:
            placed = place(job, self._inputs.resources)
        if placed is None:
            return None
        found = self._loaded(self._at(placed, context_plan, ubatch=launch.ubatch), launch.load_mode)
        return with_launch(_with_threads(found, launch.threads), numa=launch.numa, cpus=launch.cpus)

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        """A plan of an earlier start in the memory that is free now, or what it lacks, in words. Sizes are computed,
        whatever it allocated then."""
        return plan_now(self._given, measured)

    def after(self, plan: Plan, shortage: Shortage) -> Reduced | None:
        inputs = self._given
        found = missing(inputs.hardware, plan, shortage, inputs.limits)
        if found is None:
            return None
        taken = partial(taken_mib, inputs.hardware, gpu_id=found.gpu_id)
        space = self._with_limits(limits=found.limits)
        return Reduced(space=space, missing_mib=found.missing_mib, where=found.where, taken_mib=taken)

    def costs(self, plan: Plan) -> Costs:
        cores, cpu = max(1, self._given.hardware.cpu.cores), self._given.resources.cpu
        return with_threads(self._costs_of(plan), launch_of(plan).threads, cores, cpu)

    def _costs_of(self, plan: Plan) -> Costs:
        """With every core at work."""
        launch, inputs = launch_of(plan), self._given
        is_pinned = launch.load_mode in PINNED
        key = (*_where(plan), plan.kv_type, launch.ubatch, is_pinned)
        if key not in self._costs:
            job = replace(inputs.job, context=padded(plan.context), kv_type=plan.kv_type, ubatch=launch.ubatch)
            self._costs[key] = placement_costs(job, inputs.resources, plan.placement, is_pinned=is_pinned)
        return self._costs[key]

    @property
    def knob_effects(self) -> Mapping[str, KnobEffect]:
        return KNOB_EFFECTS

    def modelled(self, plan: Plan) -> str | None:
        """What an expert cache would do beside this plan, for people to read; None where nothing is known of it."""
        return modelled(self._given.model, self._given.resources, plan.placement)

    def kv_tokens(self, plan: Plan) -> int | None:
        """The engine tells sizes, and no tokens."""
        return None

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        """Of each device: its name to the engine, MiB that the plan takes, MiB that there are. The host is left out:
        what is mapped there needs no room."""
        shares = enumerate(plan.placement.shares)
        return tuple(
            (f"CUDA{at}", share.memory.total, share.gpu.free_mib + share.gpu.held_back_mib) for at, share in shares
        )


def _with_threads(plan: Plan, threads: int) -> Plan:
    is_same = threads == launch_of(plan).threads
    return plan if is_same else with_launch(plan, threads=threads, threads_batch=threads)


def _with_numa(plan: Plan, numa: Numa) -> Plan:
    if (numa.mode, numa.cpus) == (launch_of(plan).numa, launch_of(plan).cpus):
        return plan
    plan = with_launch(plan, numa=numa.mode, cpus=numa.cpus)
    kept = tuple(choice for choice in plan.choices if choice.name != "numa")
    return replace(plan, choices=(*kept, numa.choice) if numa.choice else kept)


def _where(plan: Plan) -> tuple[str, ...]:
    """Which layers lie on which cards: to the engine whichever is used first is the first."""
    return (plan.placement.summary(), *(share.gpu.id for share in plan.placement.shares))


def _why_beside(*, asked: bool) -> str:
    """Prices are told of the prediction only: they are of its placement."""
    return "asked for" if asked else "measured beside others"


def _reworded(plan: Plan, **words: tuple[str, str]) -> Plan:
    """With another value and reason for some of its choices."""
    choices = tuple(
        replace(choice, value=words[choice.name][0], reason=words[choice.name][1]) if choice.name in words else choice
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def _in_parallel(inputs: PlanInputs, found: ContextPlan) -> ContextPlan | None:
    """The same context in split mode tensor, where that is clearly faster than whole layers and relies on nothing that
    nobody has seen: two cards with good links, and an architecture that runs so. Else it is for measuring.

    The context stays that of whole layers, though this mode may carry another: it is experimental, and where it aborts
    or turns out slower, whole layers have to serve what was promised.
    """
    if inputs.model.architecture not in TRUSTED or "f16" not in offered_kinds(inputs):
        return None
    for placed in _split(inputs, replace(found, kv_type="f16"), ubatch=inputs.job.ubatch):
        if has_good_links(placed.placement) and placed.cost * CLEARLY <= found.placed.cost:
            return _split_plan(inputs, found, placed)
    return None


def _split_plan(inputs: PlanInputs, found: ContextPlan, placed: Placed) -> ContextPlan:
    """What was compared to find the context were whole layers: no figure of theirs is told of this placement."""
    job = replace(inputs.job, context=padded(found.context), kv_type="f16")
    more = replace(job, context=padded(found.context + CONTEXT_STEP))
    costs = placement_costs(job, inputs.resources, placed.placement)
    return ContextPlan(
        kv_type="f16",
        context=found.context,
        placed=placed,
        carried={"f16": found.context},
        ubatch=job.ubatch,
        bound=AS_WHOLE if place_same(more, inputs.resources, placed.placement, inputs.engine.split_modes) else NO_FIT,
        half_full=1000 / decode_ms(costs, found.context / 2),
        is_explicit=found.is_explicit,
    )


def _split(inputs: PlanInputs, context_plan: ContextPlan, *, ubatch: int) -> tuple[Placed, ...]:
    job = replace(inputs.job, context=padded(context_plan.context), kv_type=context_plan.kv_type, ubatch=ubatch)
    return place_tensors(job, inputs.resources, inputs.engine.split_modes)


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
        speed=placed.speed,
    )
