"""All plans of one start: the prediction, every other plan that fits (variations.py), and plans of an earlier start in
the memory that is free now. Pure. Plans are computed on first use: a start from a profile needs only the last kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from appliance.engines.engine import Reduced
from appliance.engines.llama.planning.arguments.launch import KNOB_EFFECTS, launch_of
from appliance.engines.llama.planning.decide import aim_of, context_for, predicted, wanted_context, with_split
from appliance.engines.llama.planning.expert_slots import SlotsOffer, grown, offer_slots, with_slots
from appliance.engines.llama.planning.hardware.observed_limits import NO_LIMITS, Limits
from appliance.engines.llama.planning.inputs import (
    PlanInputs,
    check,
    plan_inputs,
    with_less,
)
from appliance.engines.llama.planning.memory.kv_types import unjudged, worth_checking
from appliance.engines.llama.planning.memory.memory import padded
from appliance.engines.llama.planning.placement.batch import PINNED
from appliance.engines.llama.planning.placement.context import ContextPlan, choose_context, enough_of
from appliance.engines.llama.planning.placement.job_time import placement_costs
from appliance.engines.llama.planning.placement.placement import place
from appliance.engines.llama.planning.placement.roofline import with_threads
from appliance.engines.llama.planning.placement.tensor_mode import TENSOR
from appliance.engines.llama.planning.placement.tensor_placement import place_same
from appliance.engines.llama.planning.replan import plan_now
from appliance.engines.llama.planning.shortage import missing, taken_mib
from appliance.engines.llama.planning.speculation import applied, as_asked, estimate, kinds, still_applied
from appliance.engines.llama.planning.variations import Variations, where, with_thread_count
from appliance.errors import ModelDoesNotFitError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import (
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
    with_choice,
    with_launch,
)
from appliance.probe import Hardware
from appliance.settings import Settings


class Space:
    """All plans of one start. See `appliance.engines.engine.Space`.

    Raises ConfigError (10) for a setting that the engine cannot take, ModelDoesNotFitError (31) if no plan fits.
    """

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
        """Check the settings and gather the inputs.

        `kv_checks` are quality checks of KV cache types: plans use a type below q8_0 only if a check accepts it.
        `kernels` as for `plan_inputs`. `draft` is the draft model; None if none is given.
        """
        check(settings, engine, model)
        facts = (settings, image, engine, hardware, model)
        self._with_limits = partial(Space, *facts, kv_checks=kv_checks, kernels=kernels, draft=draft)
        inputs = plan_inputs(*facts, kernels, limits)
        self._given = replace(inputs, kv_checks=tuple(kv_checks))
        self._limits = limits
        self._image = image
        self._draft = draft
        self._aim = aim_of(settings)
        self._costs: dict[tuple[object, ...], Costs] = {}

    @cached_property
    def _decided(self) -> tuple[PlanInputs, ContextPlan]:
        """Inputs and context decision, with the projector if it fits."""
        refusal: ModelDoesNotFitError | None = None
        for inputs in with_less(self._given):
            try:
                return inputs, context_for(inputs, self._aim)
            except ModelDoesNotFitError as error:
                refusal = error  # the last one has the smallest need
        raise refusal or AssertionError

    @property
    def _inputs(self) -> PlanInputs:
        return self._decided[0]

    @property
    def context_plan(self) -> ContextPlan:
        return self._decided[1]

    @cached_property
    def best(self) -> Plan:
        """The predicted plan, without speculative decoding. It has slots for experts only if the user asked for them.

        Raises ModelDoesNotFitError if these do not fit.
        """
        found = self._with_slots if self._slots.is_served else None
        return found or self._beside.best

    @cached_property
    def _slots(self) -> SlotsOffer:
        return offer_slots(self._inputs, self._split[0])

    @cached_property
    def _split(self) -> tuple[ContextPlan, Choice | None]:
        return with_split(self._inputs, self.context_plan)

    @cached_property
    def _with_slots(self) -> Plan | None:
        """The prediction with slots on the GPU for experts in host memory; None if they are not worth measuring."""
        offer = self._slots
        if offer.placed is None or offer.slots is None:
            return None
        return self._beside.with_slots(offer.placed, offer.slots)

    @cached_property
    def _beside(self) -> Variations:
        """The plans beside the prediction without slots."""
        found = with_choice(predicted(self._inputs, self._image, *self._split), self._slots.choice)
        has_runner_up = self._given.kernels.candidate is not None and not found.placement.is_whole
        best = replace(found, has_runner_up=has_runner_up)
        return Variations(self._inputs, best, self.context_plan, self._costs_of)

    @cached_property
    def _runner_up(self) -> Space | None:
        """The plans with the next fastest CPU variant, which measuring may find faster; None if none is a candidate."""
        kernels = self._given.kernels.candidate
        return self._with_limits(kernels=kernels, limits=self._limits) if kernels else None

    def _of(self, plan: Plan) -> Space:
        """Return the space of the plan's CPU variant: this one or the runner-up's."""
        other = self._runner_up if plan.has_runner_up else None
        return other if other and plan.cpu_variant == other._given.kernels.variant else self

    @property
    def predicted(self) -> Plan:
        """The predicted plan, with the kind of speculative decoding that was asked for.

        Raises ModelDoesNotFitError if that kind has no room.
        """
        inputs = self._inputs
        return as_asked(self.best, inputs.settings, model=inputs.model, draft=self._draft, isa=inputs.kernels.isa)

    def offers(self) -> tuple[Offer, ...]:
        """Return every kind of speculative decoding, the most promising first.

        Raises ConfigError if the kind that was asked for is impossible here.
        """
        return kinds(self._given.settings, self._given.model, self._given.engine, self._draft)

    def speculation(self, plan: Plan, kind: Kind, tokens: int) -> Speculation:
        """Return the memory and settings that this kind of speculative decoding adds to the plan."""
        inputs = self._of(plan)._given
        return estimate(plan, kind, tokens, model=inputs.model, draft=self._draft, isa=inputs.kernels.isa)

    def speculating(self, plan: Plan, speculation: Speculation, choice: Choice | None = None) -> Plan:
        """Return the plan with speculative decoding. Raises ModelDoesNotFitError if it has no room."""
        return applied(plan, speculation, choice)

    def speculating_as(self, plan: Plan, measured: Plan) -> Plan:
        """Return the plan with the speculative decoding of a measured plan, if context and placement are the same.

        If they differ or memory is short, the plan stays without it and has a refusal among its choices.
        """
        return still_applied(plan, measured, draft_path=str(self._draft.path) if self._draft else None)

    @property
    def native(self) -> int:
        """The model's own context length, or the one that was asked for."""
        return self._given.native

    def exact(self, plan: Plan) -> Plan | None:
        """Return None: q8_0 is trusted, and smaller types are checked by perplexity (`kinds_to_check`)."""
        return None

    def kinds_to_check(self) -> tuple[str, ...]:
        """Return the KV cache types that are worth a quality check: with them the context would be much larger.

        The type with the largest gain comes first. The check runs with the best plan that needs no check.
        """
        inputs = self._given
        request = wanted_context(inputs, self._aim)
        on_gpu = bool(inputs.resources.devices)
        more = unjudged(inputs.settings, inputs.engine, inputs.model, inputs.kv_checks, on_gpu=on_gpu)
        # With --allow-disk every context fits, so no type has a gain.
        if not more or inputs.settings.allow_disk or inputs.model.is_embedding_model:
            return ()
        context_plan = choose_context(inputs.job, inputs.resources, replace(request, kinds=(*request.kinds, *more)))
        return worth_checking(context_plan.carried, enough=enough_of(request)) if context_plan else ()

    def all(self) -> list[Plan]:
        """Return every plan that fits, the prediction first.

        Plans differ in KV cache type, context length, ubatch, threads, load mode, and in the number of layers whose
        experts lie in host memory. With GPUs there are thousands.
        """
        best = self.best
        room = float("inf") if self._inputs.settings.allow_disk else max(best.usable_mib, best.memory.total)
        found: dict[str, Plan] = {}
        others: Iterable[Plan] = (*self._beside.all(), *self._variants())
        if self._with_slots:  # a number that was asked for is kept, so nothing else is measured then
            slotted = self._beside.around(self._with_slots)
            others = slotted if self._slots.is_served else (*others, *slotted)
        for plan in (best, *others):
            if plan.memory.total <= room:
                found.setdefault(plan.key, plan)
        return list(found.values())

    def _variants(self) -> Iterator[Plan]:
        """Yield the prediction with the runner-up CPU variant, which may copy other weights."""
        other, best = self._runner_up, self.best
        if other is None or not best.has_runner_up:
            return
        if same := other.at_context(best, best.context):
            yield from other._beside.around(replace(same, has_runner_up=True))

    def at_context(self, plan: Plan, context: int) -> Plan | None:
        """Return the same plan with a smaller context; None if it cannot be placed again."""
        if (other := self._of(plan)) is not self:
            found = other.at_context(replace(plan, has_runner_up=False), context)
            return replace(found, has_runner_up=True) if found else None
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
        if placed and launch.slots:
            placed = grown(placed, launch.slots)
        if placed is None:
            return None
        found = with_launch(self._beside.at(placed, context_plan, ubatch=launch.ubatch), slots=launch.slots)
        found = self._beside.loaded(found, launch.load_mode)
        return with_launch(with_thread_count(found, launch.threads), numa=launch.numa, cpus=launch.cpus)

    def now(self, measured: Plan, allocated: Allocated | None = None) -> Plan | str:
        """Return a plan of an earlier start, fitted to the memory that is free now, or a text that says what it lacks.

        `allocated` is not used: the sizes of this engine are computed.
        """
        found = plan_now(self._of(measured)._given, measured)
        if isinstance(found, str) or found.cpu_variant == measured.cpu_variant:
            return found
        return replace(found, has_runner_up=False)  # this CPU variant was not the one that was measured

    def after(self, plan: Plan, shortage: Shortage) -> Reduced | None:
        inputs = self._given
        found = missing(inputs.hardware, plan, shortage, inputs.limits)
        if found is None:
            return None
        taken = partial(taken_mib, inputs.hardware, gpu_id=found.gpu_id)
        space = self._with_limits(limits=found.limits)
        return Reduced(space=space, missing_mib=found.missing_mib, where=found.where, taken_mib=taken)

    def costs(self, plan: Plan) -> Costs:
        if (other := self._of(plan)) is not self:
            return other.costs(plan)
        cores, cpu = max(1, self._given.hardware.cpu.cores), self._given.resources.cpu
        return with_threads(self._costs_of(plan), launch_of(plan).threads, cores, cpu)

    def _costs_of(self, plan: Plan) -> Costs:
        """Return the plan's costs with as many threads as compute most; each is computed once."""
        launch, inputs = launch_of(plan), self._given
        is_pinned = launch.load_mode in PINNED
        key = (*where(plan), plan.kv_type, launch.ubatch, is_pinned, launch.slots)
        if key not in self._costs:
            job = replace(inputs.job, context=padded(plan.context), kv_type=plan.kv_type, ubatch=launch.ubatch)
            costs = placement_costs(job, inputs.resources, plan.placement, is_pinned=is_pinned)
            self._costs[key] = with_slots(costs, launch.slots)
        return self._costs[key]

    @property
    def knob_effects(self) -> Mapping[str, KnobEffect]:
        return KNOB_EFFECTS

    def kv_tokens(self, plan: Plan) -> int | None:
        """Return None: llama.cpp's log names the size of the KV cache in MiB, not in tokens."""
        return None

    def kv_mib(self, plan: Plan, tokens: int) -> tuple[float, ...]:
        """Return nothing: llama.cpp allocates all buffers before the first request, so plans need no observed peak."""
        return ()

    def needs(self, plan: Plan) -> tuple[tuple[str, float, float], ...]:
        """Return for each GPU its name in the engine, the MiB that the plan needs, and the MiB that are free.

        The host is left out, because mapped weights need no free memory there.
        """
        shares = enumerate(plan.placement.shares)
        return tuple(
            (f"CUDA{at}", share.memory.total, share.gpu.free_mib + share.gpu.held_back_mib) for at, share in shares
        )
