"""What a plan consists of, whatever the engine: pure nouns. Sizes are MiB of 2**20 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cached_property
from typing import Literal, TypeVar, get_args

from appliance.plan.parts.choice import Choice
from appliance.plan.parts.device import Device
from appliance.plan.parts.launch import Launch, Value
from appliance.values import dataclass

L = TypeVar("L", bound=Launch)

SMALLEST_CONTEXT = 8192  # or the model's own: clients of today do not work below it
AGENT_CONTEXT = 65536  # or the model's own: agents work with it; mode balanced takes it before speed,
QUICK_TOKENS_PER_S = 30.0  # while half of it still decodes so fast
READABLE_TOKENS_PER_S = 15.0  # about what one reads along with: what a full context has to decode in mode context
SPEED_KEPT = 0.7  # of the fastest plan's speed, what a larger context has to keep in mode balanced
NATIVE_FOR = 0.05  # of that share: what the last step to all that the model has may cost beyond it
CONTEXT_WORTH = 1.5  # times the context that costs no speed: for less than this no speed is given up
# The chat job: placements are compared by it, and plans where nothing else is asked for.
CHAT_TOKENS_IN, CHAT_TOKENS_OUT = 512, 256
Kind = Literal["draft", "mtp", "ngram"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Where no kind is asked for, what is wanted of the one that measuring chooses: all requests together sooner, no kind of
# request later, or some kind of request as soon as can be.
SpeculationGoal = Literal["auto", "stable", "fast"]
SPECULATION_GOALS: tuple[SpeculationGoal, ...] = get_args(SpeculationGoal)
# How many tokens to draft: a draft costs a pass of its own for each, n-grams only their share of the check.
SIZES: dict[Kind, tuple[int, ...]] = {"draft": tuple(range(1, 9)), "mtp": tuple(range(1, 9)), "ngram": (8, 16, 32, 64)}
UNMEASURED: dict[Kind, int] = {"draft": 3, "mtp": 1, "ngram": 16}  # experts in host memory make 1 the safe one for MTP


def speed_kept(context: int, native: int) -> float:
    """Of the fastest plan's speed, what a context has to keep in mode balanced, predicted or measured."""
    return SPEED_KEPT * (1 - NATIVE_FOR) if context >= native else SPEED_KEPT


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one place, host or GPU, in MiB. `total` is what must fit; `cache` and `checkpoints` grow to their sizes with
    use and never beyond."""

    weights: float
    kv: float
    compute: float
    output: float
    cache: float
    overhead: float
    state: float = 0.0  # of recurrent layers
    checkpoints: float = 0.0
    repacked: float = 0.0  # of the weights, what the CPU backend copies: not mapped but allocated
    mapped_twice: float = 0.0  # originals of those copies: the engine counts them, and the kernel drops them

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
        """What the engine's log adds up to for it: buffers only, and mapped files as long as they are."""
        return self.weights + self.mapped_twice + self.kv + self.state + self.compute + self.output


NOTHING = Memory(weights=0.0, kv=0.0, compute=0.0, output=0.0, cache=0.0, overhead=0.0)


@dataclass(frozen=True, kw_only=True)
class GpuAllocation:
    """What one GPU holds. `layers` counts the output as one."""

    gpu: Device
    device: str  # as the engine calls it
    layers: int
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where layers lie: the first `cpu_layers` on the CPU, then runs on GPUs in order, the last with the output. With
    `parts` all of them lie on each GPU, in part."""

    shares: tuple[GpuAllocation, ...] = ()
    cpu_layers: int = 0
    cpu_expert_layers: int = 0  # so many first layers keep their routed experts in host memory
    split_mode: str = "none"
    parts: tuple[int, ...] = ()  # where each device holds a part of every layer: of each matrix, by device

    @property
    def gpu_layers(self) -> int:
        return self.shares[0].layers if self.parts else sum(share.layers for share in self.shares)

    @property
    def is_whole(self) -> bool:
        """Everything on GPUs, but the embedding, which always is in host memory."""
        return bool(self.shares) and not (self.cpu_layers or self.cpu_expert_layers)

    @property
    def copies_weights(self) -> bool:
        """Whether weights in host memory are copied to a GPU for a prompt."""
        return bool(self.shares) and not self.is_whole

    def summary(self) -> str:
        """As in "A 33, B 32 (layer), experts of 20 on the CPU" for devices A and B."""
        split = f" ({self._split})" if len(self.shares) > 1 else ""
        return self._devices + split + self._experts

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """What tells two placements apart."""
        where = ("placement", self._devices + self._experts)
        return (where, ("split", self._split)) if self.shares else (where,)

    @property
    def _split(self) -> str:
        is_even = len(set(self.parts)) < 2
        return self.split_mode if is_even else f"{self.split_mode} {':'.join(map(str, self.parts))}"

    @property
    def _devices(self) -> str:
        return ", ".join(f"{share.device} {share.layers}" for share in self.shares) or "CPU"

    @property
    def _experts(self) -> str:
        return f", experts of {self.cpu_expert_layers} on the CPU" if self.cpu_expert_layers else ""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Tokens/s between which 80 % of the results lie that a prediction like this one was compared with."""

    low: float
    high: float

    def describe(self) -> str:
        """As in "31 to 41"."""
        return f"{_rate(self.low)} to {_rate(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted for the chat job from bandwidths alone: good for comparing placements, not a promise. Its prompt is
    longer where weights are copied to a GPU for each batch of it. The intervals are None for a placement that is only
    compared with others."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    job_s: float
    prompt_tokens: int = CHAT_TOKENS_IN
    decode_interval: Interval | None = None
    prefill_interval: Interval | None = None

    def describe(self) -> str:
        """As in "36 tok/s of decode (31 to 41), 922 of prefill (760 to 1119)"."""
        decode = f"{_rate(self.decode_tokens_per_s)} tok/s of decode{_within(self.decode_interval)}"
        return f"{decode}, {self.prefill_tokens_per_s:.0f} of prefill{_within(self.prefill_interval)}"

    def within(self, decode: float, prefill: float) -> Speed:
        """Return the speed with its intervals, each as wide as e to the power of plus and minus that."""
        return replace(
            self,
            decode_interval=_around(self.decode_tokens_per_s, decode),
            prefill_interval=_around(self.prefill_tokens_per_s, prefill),
        )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.{0 if tokens_per_s >= 9.95 else 1}f}"


def _within(interval: Interval | None) -> str:
    return f" ({interval.describe()})" if interval else ""


def _around(tokens_per_s: float, spread: float) -> Interval:
    return Interval(low=tokens_per_s * math.exp(-spread), high=tokens_per_s * math.exp(spread))


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """`tokens` are drafted at a time, at most. `adds` is what that takes beside the plan: on the GPU `device`, counted
    as the plan counts its shares, or on the host."""

    kind: Kind
    tokens: int
    draft_path: str | None = None
    draft_kv_type: str = "f16"
    device: int | None = None
    adds: Memory = NOTHING

    def describe(self) -> str:
        """As in "up to 3 tokens drafted by smol.gguf"."""
        by = {"draft": (self.draft_path or "").rpartition("/")[2], "mtp": "the model's draft layer", "ngram": "n-grams"}
        return f"up to {self.tokens} token{'s' * (self.tokens > 1)} drafted by {by[self.kind]}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One kind, whether it is worth measuring here, and why or why not."""

    kind: Kind
    is_tried: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration of an engine: everything that its command line is made from. Sizes in tokens unless the name
    says otherwise."""

    engine: str
    model_path: str
    alias: str
    context: int
    kv_type: str
    parallel: int
    is_embedding: bool  # the model gives vectors and no text: there is nothing to decode, and nothing to measure by it
    memory: Memory  # of the host; each GPU's is in the placement
    usable_mib: float
    launch: Launch  # the engine's own
    cpu_variant: str | None = None  # of the engine's kernels; None: it has no choice of them
    has_runner_up: bool = False  # another variant is measured beside it: which one serves is a knob
    placement: Placement = field(default_factory=Placement)
    speed: Speed | None = None  # predicted
    speculation: Speculation | None = None  # what it takes is in the memory above
    choices: tuple[Choice, ...] = field(default=(), repr=False)

    @property
    def predicted_mib(self) -> float:
        """Everything that the engine's log will count, on the host and on GPUs."""
        return self.memory.as_logged + sum(share.memory.as_logged for share in self.placement.shares)

    @property
    def predicted_kv_mib(self) -> float:
        """The KV cache of it."""
        return self.memory.kv + sum(share.memory.kv for share in self.placement.shares)

    @cached_property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """What the tuner varies, by name."""
        variant = (("cpu_variant", self.cpu_variant),) if self.has_runner_up and self.cpu_variant else ()
        first = (("context", self.context), ("kv_type", self.kv_type))
        return (*first, *self.launch.knobs, *self.placement.knobs, *variant)

    @cached_property
    def key(self) -> str:
        """What measuring tells plans apart by: "context 40,960, kv_type f16, threads 2, ubatch 512, placement CPU"."""
        return ", ".join(_of_knob(name, value) for name, value in self.knobs)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys under which the same start of the engine may have been measured: its own, and the one with its CPU
        variant where another variant was considered only later."""
        if self.has_runner_up or self.cpu_variant is None:
            return (self.key,)
        return (self.key, replace(self, has_runner_up=True).key)


def _of_knob(name: str, value: Value) -> str:
    return f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"


def launch_as(plan: Plan, kind: type[L]) -> L:
    """The engine's own part. Raises TypeError for a plan of another engine."""
    if not isinstance(plan.launch, kind):
        message = f"a plan of another engine: {plan.engine}"
        raise TypeError(message)
    return plan.launch


def with_launch(plan: Plan, **changes: object) -> Plan:
    """With these of the launch's fields changed."""
    return replace(plan, launch=replace(plan.launch, **changes))


def with_measured(plan: Plan, words: str, among: Iterable[Plan]) -> Plan:
    """The plan with measuring as the reason for what it decided: the knobs in which the measured plans differ, of those
    whose choices have no words of their own for it."""
    others = [dict(other.knobs) for other in among]
    names = {*dict(plan.launch.knobs), "cpu_variant"}
    knobs = {name: value for name, value in plan.knobs if name in names}
    measured = {name: f"{value}" for name, value in knobs.items() if any(other.get(name) != value for other in others)}
    choices = tuple(
        replace(choice, value=measured[choice.name], reason=words, source="measured")
        if choice.name in measured and choice.source in ("probe", "default")
        else choice  # what was asked for stays asked for
        for choice in plan.choices
    )
    return replace(plan, choices=choices)


def with_choice(plan: Plan, choice: Choice | None) -> Plan:
    """With these words in the place of what was said of the same name."""
    if choice is None:
        return plan
    return replace(plan, choices=(*(c for c in plan.choices if c.name != choice.name), choice))
