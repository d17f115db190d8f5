"""A plan and its parts, the same for all engines. Sizes are MiB of 2**20 bytes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cached_property
from typing import Literal, TypeVar, get_args

from appliance.plan.parts.choice import Choice
from appliance.plan.parts.device import Device
from appliance.plan.parts.drafts import ExpectedGain, SpeculationGoal
from appliance.plan.parts.launch import Launch, Value
from appliance.plan.parts.speeds import rate
from appliance.values import dataclass

L = TypeVar("L", bound=Launch)

# If the model's own context length is smaller, it replaces each of the first two.
SMALLEST_CONTEXT = 8192  # today's clients do not work with less
AGENT_CONTEXT = 65536  # agents work with it: in mode balanced it is more important than speed,
QUICK_TOKENS_PER_S = 30.0  # as long as decode with half of it in the cache is this fast
READABLE_TOKENS_PER_S = 15.0  # about reading speed: mode context asks for it when the context is full
SPEED_KEPT = 0.7  # share of the fastest plan's speed that a larger context has to keep in mode balanced
NATIVE_FOR = 0.05  # share of SPEED_KEPT that the step to the native length may cost in addition
CONTEXT_WORTH = 1.5  # a context has to be this many times as long to be worth any speed
# The chat job: placements are compared by it, and plans too if no other workload is asked for.
CHAT_TOKENS_IN, CHAT_TOKENS_OUT = 512, 256
Kind = Literal["draft", "mtp", "ngram"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SPECULATION_GOALS: tuple[SpeculationGoal, ...] = get_args(SpeculationGoal)
# Numbers of draft tokens to try. A draft model needs a pass for each token; n-grams cost only their share of the check.
SIZES: dict[Kind, tuple[int, ...]] = {"draft": tuple(range(1, 9)), "mtp": tuple(range(1, 9)), "ngram": (8, 16, 32, 64)}
# Draft tokens if nothing was measured. 1 is the safe number for MTP, because experts may lie in host memory.
UNMEASURED: dict[Kind, int] = {"draft": 3, "mtp": 1, "ngram": 16}


def speed_kept(context: int, native: int) -> float:
    """Return the share of the fastest plan's speed that a context has to keep in mode balanced."""
    return SPEED_KEPT * (1 - NATIVE_FOR) if context >= native else SPEED_KEPT


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a plan in one place, the host or a GPU, in MiB. `total` has to fit. `cache` and `checkpoints` grow with
    use up to these sizes."""

    weights: float
    kv: float
    compute: float
    output: float
    cache: float
    overhead: float
    state: float = 0.0  # states of recurrent layers
    checkpoints: float = 0.0
    repacked: float = 0.0  # part of the weights that the CPU backend copies: allocated, not mapped
    mapped_twice: float = 0.0  # originals of those copies: the engine's log counts them, but the kernel may drop them

    @property
    def total(self) -> float:
        return (
            self.weights
            + self.kv
            + self.compute
            + self.output
            + self.cache
            + self.overhead
            + self.state
            + self.checkpoints
        )

    @property
    def as_logged(self) -> float:
        """Sum that the engine's log shows: buffers only, and the full size of mapped files."""
        return self.weights + self.mapped_twice + self.kv + self.state + self.compute + self.output


NOTHING = Memory(weights=0.0, kv=0.0, compute=0.0, output=0.0, cache=0.0, overhead=0.0)


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


@dataclass(frozen=True, kw_only=True)
class GpuAllocation:
    """Layers and memory of a plan on one GPU. `layers` counts the output as one."""

    gpu: Device
    device: str  # the engine's name of the GPU
    layers: int
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of layers: the first `cpu_layers` on the CPU, then a run on each GPU in order, the last one with the
    output. With `parts`, each GPU holds a part of every layer."""

    shares: tuple[GpuAllocation, ...] = ()
    cpu_layers: int = 0
    cpu_expert_layers: int = 0  # number of first layers whose routed experts lie in host memory
    split_mode: str = "none"
    parts: tuple[int, ...] = ()  # in split mode tensor, the part of each matrix on each GPU; else empty

    @property
    def gpu_layers(self) -> int:
        return self.shares[0].layers if self.parts else sum(share.layers for share in self.shares)

    @property
    def is_whole(self) -> bool:
        """True if everything lies on GPUs, except the embedding, which is always in host memory."""
        return bool(self.shares) and not (self.cpu_layers or self.cpu_expert_layers)

    @property
    def copies_weights(self) -> bool:
        """True if weights in host memory are copied to a GPU to read a prompt."""
        return bool(self.shares) and not self.is_whole

    def summary(self) -> str:
        """Return words like "A 33, B 32 (layer), experts of 20 on the CPU" for devices A and B."""
        split = f" ({self.split_mode})" if len(self.shares) > 1 else ""
        return self._held + split + self._experts

    def describe(self) -> str:
        """Return the words of `summary` without the split mode."""
        return self._held + self._experts

    @property
    def part_shares(self) -> tuple[float, ...]:
        """The share of every layer on each GPU in split mode tensor, adding up to 1; else empty."""
        return tuple(part / sum(self.parts) for part in self.parts)

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """Values that tell two placements apart. Profiles keep them, so they stay as they are."""
        where = ("placement", self._devices + self._experts)
        return (where, ("split", self._split)) if self.shares else (where,)

    @property
    def _split(self) -> str:
        is_even = len(set(self.parts)) < 2
        return self.split_mode if is_even else f"{self.split_mode} {':'.join(map(str, self.parts))}"

    @property
    def _held(self) -> str:
        """What each device holds, for people: layers, or the share of all layers."""
        if not self.parts:
            return self._devices
        held = (f"{each.device} {percent(share)}" for each, share in zip(self.shares, self.part_shares, strict=True))
        return f"{', '.join(held)} of {self.gpu_layers} layers"

    @property
    def _devices(self) -> str:
        return ", ".join(f"{share.device} {share.layers}" for share in self.shares) or "CPU"

    @property
    def _experts(self) -> str:
        return f", experts of {self.cpu_expert_layers} on the CPU" if self.cpu_expert_layers else ""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Tokens/s between which 80 % of published results lie, for predictions of the same kind."""

    low: float
    high: float

    def describe(self) -> str:
        """Return words like "31 to 41"."""
        return f"{rate(self.low)} to {rate(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted speed in the chat job, from bandwidths and arithmetic: good for comparing placements, not a promise.
    The prompt is longer if weights are copied to a GPU for each batch. The intervals are None for placements that are
    only compared with others."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    job_s: float
    prompt_tokens: int = CHAT_TOKENS_IN
    decode_interval: Interval | None = None
    prefill_interval: Interval | None = None

    def describe(self) -> str:
        """Return words like "36 tok/s of decode (31 to 41), 922 of prefill (760 to 1119)"."""
        decode = f"{rate(self.decode_tokens_per_s)} tok/s of decode{_within(self.decode_interval)}"
        return f"{decode}, {rate(self.prefill_tokens_per_s)} of prefill{_within(self.prefill_interval)}"

    def within(self, decode: float, prefill: float) -> Speed:
        """Return the speed with its intervals: the speed times e^-spread to e^spread, for decode and prefill."""
        return replace(
            self,
            decode_interval=_around(self.decode_tokens_per_s, decode),
            prefill_interval=_around(self.prefill_tokens_per_s, prefill),
        )


def _within(interval: Interval | None) -> str:
    return f" ({interval.describe()})" if interval else ""


def _around(tokens_per_s: float, spread: float) -> Interval:
    return Interval(low=tokens_per_s * math.exp(-spread), high=tokens_per_s * math.exp(spread))


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculative decoding of a plan: at most `tokens` are drafted at a time. `adds` is the additional memory, on the
    GPU `device` (an index of the plan's shares) or on the host."""

    kind: Kind
    tokens: int
    draft_path: str | None = None
    draft_kv_type: str = "f16"
    device: int | None = None
    adds: Memory = NOTHING

    def describe(self) -> str:
        """Return words like "up to 3 tokens drafted by smol.gguf"."""
        by = {"draft": (self.draft_path or "").rpartition("/")[2], "mtp": "the model's draft layer", "ngram": "n-grams"}
        return f"up to {self.tokens} token{'s' * (self.tokens > 1)} drafted by {by[self.kind]}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of speculative decoding, and whether it is measured here, with the reason."""

    kind: Kind
    is_tried: bool
    reason: str
    tokens: int | None = None  # the number of draft tokens that the user set; None: measuring chooses it
    gain: ExpectedGain | None = None  # None: no published results to expect anything from


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration of an engine, from which its command line is made. Sizes are in tokens unless the name says
    otherwise."""

    engine: str
    model_path: str
    alias: str
    context: int
    kv_type: str
    parallel: int
    is_embedding: bool  # True if the model gives vectors and no text, so that no decode speed is measured
    memory: Memory  # host memory; that of each GPU is in the placement
    usable_mib: float  # host memory that is usable
    launch: Launch  # the engine's own part
    cpu_variant: str | None = None  # CPU variant of the engine; None: it has no variants
    has_runner_up: bool = False  # True if another CPU variant is measured too, which makes the variant a knob
    placement: Placement = field(default_factory=Placement)
    speed: Speed | None = None  # predicted
    speculation: Speculation | None = None  # its memory is included above
    choices: tuple[Choice, ...] = field(default=(), repr=False)

    @property
    def predicted_mib(self) -> float:
        """Memory that the engine's log will show, on the host and on GPUs."""
        return self.memory.as_logged + sum(share.memory.as_logged for share in self.placement.shares)

    @property
    def predicted_kv_mib(self) -> float:
        """KV cache on the host and on GPUs."""
        return self.memory.kv + sum(share.memory.kv for share in self.placement.shares)

    @cached_property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """Values that the tuner varies, by name."""
        variant = (("cpu_variant", self.cpu_variant),) if self.has_runner_up and self.cpu_variant else ()
        first = (("context", self.context), ("kv_type", self.kv_type))
        return (*first, *self.launch.knobs, *self.placement.knobs, *variant)

    @cached_property
    def key(self) -> str:
        """The knobs as text, to identify measured plans: "context 40,960, kv_type f16, threads 2, placement CPU"."""
        return ", ".join(_of_knob(name, value) for name, value in self.knobs)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys under which this plan may have been measured: its own, and its key with the CPU variant as a knob.

        A measurement has the latter if another variant was a candidate then.
        """
        if self.has_runner_up or self.cpu_variant is None:
            return (self.key,)
        return (self.key, replace(self, has_runner_up=True).key)


def _of_knob(name: str, value: Value) -> str:
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def launch_as(plan: Plan, kind: type[L]) -> L:
    """Return the engine's own part of a plan. Raises TypeError for a plan of another engine."""
    if not isinstance(plan.launch, kind):
        message = f"a plan of another engine: {plan.engine}"
        raise TypeError(message)
    return plan.launch


def with_launch(plan: Plan, **changes: object) -> Plan:
    """Return the plan with changed fields of its launch part."""
    return replace(plan, launch=replace(plan.launch, **changes))


def with_measured(plan: Plan, words: str, among: Iterable[Plan]) -> Plan:
    """Return the plan with `words` as the reason for the knobs that measuring decided.

    These are the knobs in which the measured plans `among` differ. A choice that a setting, the memory or the model
    decided keeps its reason.
    """
    others = [dict(other.knobs) for other in among]
    names = {*dict(plan.launch.knobs), "cpu_variant"}
    knobs = {name: value for name, value in plan.knobs if name in names}
    measured = {name: f"{value}" for name, value in knobs.items() if any(other.get(name) != value for other in others)}
    choices = tuple(
        replace(choice, value=measured[choice.name], reason=words, source="measured")
        if choice.name in measured and choice.source in ("probe", "default")
        else choice
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def with_choice(plan: Plan, choice: Choice | None) -> Plan:
    """Return the plan with `choice` in place of the one with the same name; unchanged for None."""
    if choice is None:
        return plan
    return replace(plan, choices=(*(c for c in plan.choices if c.name != choice.name), choice))
