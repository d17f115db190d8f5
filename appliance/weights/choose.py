"""Choose which of several files is served on this machine, by fit, predicted speed and quality.

Pure; the planner's forecasts are passed in. README.md has the rule and its reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from appliance.values import dataclass
from appliance.weights.cache.size import in_column

Tier = Literal["quality", "balanced", "compact"]
Verdict = Literal[
    "chosen", "fits", "slow", "short context", "does not fit", "no room", "offline", "other tier", "damaged", "unknown"
]

FLOOR_TOKENS_PER_S = 8.0  # decode; slower than people read
FLUENT_TOKENS_PER_S = 15.0  # decode; above this a larger model is worth more than speed
GOOD_ENOUGH = 0.7  # of the best worth: about half of the parameters
# Context length per request if the user sets none: a chat, a chat with documents, an agent.
USUAL_CONTEXT: Mapping[str, int] = MappingProxyType({"speed": 8192, "balanced": 16384, "context": 32768})
TIER_WORTH: Mapping[Tier, float] = MappingProxyType({"quality": 1.0, "balanced": 0.97, "compact": 0.85})
# If a part is in host memory, each further bit costs speed, and memory that others need.
QUALITY_ON_THE_HOST = 0.95


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One file, or the parts of one."""

    name: str  # as `--model` takes it
    tier: Tier
    quantization: str
    parameters_b: float  # 10⁹
    active_b: float  # 10⁹, per token
    bytes: int
    missing_bytes: int  # still to be fetched; 0 if the file is on the volume
    generation: float = 1.0  # of the model, relative to the oldest candidate: 3.5 / 3
    problem: str | None = None  # why the file on the volume cannot be read

    @property
    def is_here(self) -> bool:
        return not self.missing_bytes

    @property
    def effective_b(self) -> float:
        """Geometric mean of all and active parameters: a mixture of experts is worth less than a dense model of its
        size."""
        return math.sqrt(self.parameters_b * self.active_b)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The planner's forecast for one candidate. Speeds are for a KV cache filled to half of the wanted context."""

    where: str
    context: int
    is_on_gpus: bool  # True if all of it is on GPUs
    decode_tokens_per_s: float | None  # None: the planner does not predict it
    prefill_tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Wants:
    """The user's wishes, and the free space on the volume."""

    context: int
    free_bytes: int | None = None  # None: unknown
    is_offline: bool = False
    tier: Tier | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    candidate: Candidate
    forecast: Forecast | None
    verdict: Verdict
    reason: str

    @property
    def worth(self) -> float:
        """Value used to compare candidates; 0 if it cannot be served."""
        if self.forecast is None:
            return 0.0
        decode = self.forecast.decode_tokens_per_s
        speed = 1.0 if decode is None else min(1.0, decode / FLUENT_TOKENS_PER_S)
        tier = TIER_WORTH[self.candidate.tier]
        if self.candidate.tier == "quality" and not self.forecast.is_on_gpus:
            tier = QUALITY_ON_THE_HOST
        return math.sqrt(self.candidate.effective_b) * self.candidate.generation**2 * tier * speed


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All candidates as `rows`, in their order. `better` would be fetched if the chosen file were not on the volume
    already."""

    rows: tuple[Row, ...]
    chosen: Row | None
    better: Row | None = None


def choose(
    candidates: Sequence[Candidate], forecasts: Mapping[str, Forecast | str], wants: Wants, *, default: str = ""
) -> Choice:
    """Choose a candidate. `forecasts` are by name; a text says why there is none.

    `default` is taken if nothing is known about any candidate.
    """
    rows = [_judged(candidate, forecasts.get(candidate.name, ""), wants) for candidate in candidates]
    chosen, better, why = _picked(rows, default)
    if chosen is None:
        return Choice(rows=tuple(rows), chosen=None)
    told = replace(chosen, verdict="chosen", reason=why)
    return Choice(rows=tuple(told if row is chosen else row for row in rows), chosen=told, better=better)


def keep(choice: Choice, name: str) -> Choice:
    """Keep an earlier start's choice if it still fits and is on the volume; a better one is only named."""
    chosen = choice.chosen
    kept = next((row for row in choice.rows if row.candidate.name == name), None)
    if chosen is None or kept is None or kept.verdict != "fits" or not kept.candidate.is_here:
        return choice
    other = replace(chosen, verdict="fits", reason="")
    better = choice.better or other
    told = replace(
        kept, verdict="chosen", reason=f"chosen by an earlier start; {better.candidate.name} would be better"
    )
    now = {name: told, other.candidate.name: other}
    rows = tuple(now.get(row.candidate.name, row) for row in choice.rows)
    return Choice(rows=rows, chosen=told, better=better)


def usual_context(mode: str, native: int) -> int:
    return min(USUAL_CONTEXT[mode], native)


def _judged(candidate: Candidate, forecast: Forecast | str, wants: Wants) -> Row:
    found = None if isinstance(forecast, str) else forecast
    verdict, reason = _verdict(candidate, forecast, wants)
    return Row(candidate=candidate, forecast=found, verdict=verdict, reason=reason)


def _verdict(candidate: Candidate, forecast: Forecast | str, wants: Wants) -> tuple[Verdict, str]:
    if wants.tier and candidate.tier != wants.tier:
        return "other tier", f"tier '{wants.tier}' was requested"
    if candidate.problem:
        return "damaged", candidate.problem
    if not candidate.is_here and wants.is_offline:
        return "offline", "not on the volume, and offline"
    if wants.free_bytes is not None and candidate.missing_bytes > wants.free_bytes:
        return "no room", f"the volume has {in_column(wants.free_bytes)} free"
    if isinstance(forecast, str):
        return ("does not fit", forecast) if forecast else ("unknown", "its layers are unknown until it is fetched")
    if forecast.context < wants.context:
        return "short context", f"{wants.context:,} tokens were requested"
    decode = forecast.decode_tokens_per_s
    if decode is not None and decode < FLOOR_TOKENS_PER_S:
        return "slow", f"below {FLOOR_TOKENS_PER_S:g} tok/s"
    return "fits", ""


def _picked(rows: Sequence[Row], default: str) -> tuple[Row | None, Row | None, str]:
    """Return the chosen row, a better one that would have to be fetched, and the reason."""
    fitting = [row for row in rows if row.verdict == "fits"]
    if fitting:
        best = max(fitting, key=lambda row: row.worth)
        here = max((row for row in fitting if row.candidate.is_here), key=lambda row: row.worth, default=None)
        if here is None or here.worth < GOOD_ENOUGH * best.worth:
            return best, None, "the largest useful model on this machine"
        if here.worth >= best.worth:
            return here, None, "the largest useful model on this machine, already on the volume"
        return here, best, f"on the volume and good enough; {best.candidate.name} would be better"
    served = [row for row in rows if row.verdict in ("slow", "short context")]
    if served:
        return max(served, key=_least_bad), None, "no model is both fast enough and long enough: the fastest"
    unknown = [row for row in rows if row.verdict == "unknown"]
    found = next((row for row in unknown if row.candidate.name == default), unknown[0] if unknown else None)
    return found, None, "its speed on this machine is unknown"


def _least_bad(row: Row) -> tuple[bool, float, float]:
    """Sort key: the wanted context first, then speed, then worth."""
    forecast = row.forecast
    decode = (forecast.decode_tokens_per_s if forecast else None) or 0.0
    return row.verdict == "slow", decode, row.worth
