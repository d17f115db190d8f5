"""The first five lines of a plan, which experts read before the reasons. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from appliance.errors import printable
from appliance.plan.parts.speeds import duration, rate
from appliance.plan.plan import GpuAllocation, Placement, Plan, percent
from appliance.values import dataclass

NOTICED = 0.97  # a smaller loss of prefill speed is not mentioned


@dataclass(frozen=True, kw_only=True)
class ContextPrice:
    """Predicted speeds with one context length, to compare it with another."""

    decode_tokens_per_s: float  # near empty
    prefill_tokens_per_s: float  # of a prompt that is as long as those that the plan is priced with
    fill_s: float  # time to read a prompt that fills the context


@dataclass(frozen=True, kw_only=True)
class LargerContext:
    """A longer context that another setting would give, the speeds that it would have, and those of the plan."""

    context: int
    setting: str  # a flag with its value
    decode_tokens_per_s: float | None  # None: unknown
    price: ContextPrice | None = None  # None: unknown
    now: ContextPrice | None = None  # the plan's own speeds with its own context; None: unknown

    def describe(self) -> str:
        """Return "131,072 with --ctx-size 131072 (decode 33 -> 14 tok/s, read in full in 40 s -> 3 min)"."""
        words = f"{self.context:,} with {self.setting}"
        if self.price is None or self.now is None:
            return words
        return f"{words} ({', '.join(_changes(self.now, self.price))})"


def _changes(now: ContextPrice, then: ContextPrice) -> Iterator[str]:
    """Yield words on the decode speed, and on what else changes."""
    decode = _change(rate(now.decode_tokens_per_s), rate(then.decode_tokens_per_s))
    yield f"decode {decode} tok/s"
    if then.prefill_tokens_per_s < NOTICED * now.prefill_tokens_per_s:
        yield f"prefill {_change(rate(now.prefill_tokens_per_s), rate(then.prefill_tokens_per_s))}"
    if duration(now.fill_s) != duration(then.fill_s):
        yield f"read in full in {_change(duration(now.fill_s), duration(then.fill_s))}"


def _change(now: str, then: str) -> str:
    return then if now == then else f"{now} -> {then}"


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first five lines of a plan."""

    context: str
    placement: str
    speed: str
    memory: str
    command: str

    def describe(self) -> str:
        """Return the five lines, each with its name in front."""
        rows = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return "\n".join(f"{name:<9}  {printable(words)}" for name, words in rows)


def head_of(
    plan: Plan,
    command: str,
    *,
    native: int | None = None,
    larger: Sequence[LargerContext] = (),
    measured: str = "",
    to_measure: Sequence[str] = (),
) -> Head:
    """Return the first five lines of a plan. `command` is the command that starts the engine, as one line.

    `native` is the model's own context length; None: unknown. `measured` are measured speeds in words; "": none, the
    prediction is shown. `to_measure` names the knobs and kinds of speculative decoding that measuring will decide.
    """
    return Head(
        context=_context(plan, native, larger),
        placement=_placement(plan.placement),
        speed=_speed(plan, measured, to_measure),
        memory=memory_left(plan),
        command=command,
    )


def _context(plan: Plan, native: int | None, larger: Sequence[LargerContext]) -> str:
    of = "" if native is None else f" of the model's {native:,}"
    if plan.context == native:
        of = ", the model's native length"
    requests = f"{plan.parallel} request{'s' * (plan.parallel > 1)} at once"
    more = "; ".join(("", *(each.describe() for each in larger)))
    return f"{plan.context:,} tokens{of}, KV cache {plan.kv_type}, {requests}{more}"


def _placement(placement: Placement) -> str:
    """Return words like "NVIDIA GeForce RTX 4090: 49 layers; host memory: experts of 28 layers"."""
    if not placement.shares:
        return "all on the CPU"
    parts = [f"{_named(shares)}: {held}{_each(shares)}" for held, shares in _by_part(placement)]
    split = f" (split: {placement.split_mode})" if len(placement.shares) > 1 else ""
    host = [_layers(placement.cpu_layers)] if placement.cpu_layers else []
    host += [f"experts of {_layers(placement.cpu_expert_layers)}"] if placement.cpu_expert_layers else []
    return "; ".join((", ".join(parts) + split, *([f"host memory: {' and '.join(host)}"] if host else [])))


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _by_part(placement: Placement) -> Iterator[tuple[str, list[GpuAllocation]]]:
    """Yield groups of neighbouring GPUs with the same name, and what each of them holds: layers, or a share of all."""
    of_all = [f"{percent(share)} of every layer" for share in placement.part_shares]
    held = of_all or [_layers(share.layers) for share in placement.shares]
    rows = zip(held, placement.shares, strict=True)
    for (part, _), group in groupby(rows, key=lambda row: (row[0], row[1].gpu.name)):
        yield part, [share for _, share in group]


def _named(shares: Sequence[GpuAllocation]) -> str:
    name = shares[0].gpu.name
    return f"{len(shares)} x {name}" if len(shares) > 1 else name


def _each(shares: Sequence[GpuAllocation]) -> str:
    return " each" if len(shares) > 1 else ""


def _speed(plan: Plan, measured: str, to_measure: Sequence[str]) -> str:
    if plan.is_embedding:
        said = "not predicted for a model that makes no text"
    else:
        said = measured or (f"predicted: {plan.speed.describe()}" if plan.speed else "not predicted")
    return f"{said}; will be measured: {', '.join(to_measure)}" if to_measure else said


def memory_left(plan: Plan) -> str:
    """Return words like "A 6,451 of 6,458 MiB, 7 left; host 23,413 of 29,952 MiB, 6,539 left".

    What a GPU takes of the memory that it shares with the host is part of the host's row.
    """
    shared = sum(share.memory.total for share in plan.placement.shares if share.gpu.is_unified)
    name = "host and GPU" if shared else "host"
    shares = [share for share in plan.placement.shares if not share.gpu.is_unified]
    places = [(share.device, share.memory.total, share.gpu.free_mib) for share in shares]
    rows = [*_alike(places), ([name], plan.memory.total + shared, plan.usable_mib + shared)]
    return "; ".join(_taken(*row) for row in rows)


def _taken(names: list[str], taken: float, may: float) -> str:
    name = f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
    each = " each" if len(names) > 1 else ""
    return f"{name} {taken:,.0f} of {may:,.0f} MiB{each}, {_left(taken, may)}"


def _left(taken: float, may: float) -> str:
    left = round(may) - round(taken)
    return f"{left:,} left" if left >= 0 else f"{-left:,} too few: the rest is read from disk"


def _alike(places: Sequence[tuple[str, float, float]]) -> Iterator[tuple[list[str], float, float]]:
    """Yield groups of neighbouring GPUs with the same taken and free memory: names, MiB taken, MiB there are."""
    for (taken, may), rows in groupby(places, key=lambda row: (round(row[1]), round(row[2]))):
        yield [name for name, _, _ in rows], taken, may
