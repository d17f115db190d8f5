"""What a user does with a model, as jobs: so many tokens in, so many out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT
from appliance.settings import WORKLOADS as NAMES
from appliance.settings import parse_jobs
from appliance.tune.figures.curve import Curve
from appliance.values import dataclass

EXCESS_WEIGHT = 9.0  # a second of waiting for the first token beyond the limit counts as ten


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A job. Of `tokens_in`, the first `tokens_reused` are still in the cache from the turn before."""

    name: str
    tokens_in: int
    tokens_out: int
    tokens_reused: int = 0
    ttft_limit_s: float | None = None

    @property
    def depth(self) -> int:
        """Where its speed is quoted and plans are compared: halfway through its answer."""
        return self.tokens_in + self.tokens_out // 2


# How long somebody waits for a first token: ten seconds keep the attention on a dialogue (Nielsen 1993, Usability
# Engineering, 5.5); of a tool that works by itself, and of a long document, more is expected.
CHAT = Workload(name="chat", tokens_in=CHAT_TOKENS_IN, tokens_out=CHAT_TOKENS_OUT, ttft_limit_s=10.0)
# An agent sends its whole history each turn and adds a file or a tool's answer: an eighth is new.
CODING_AGENT = Workload(name="coding agent", tokens_in=16384, tokens_out=512, tokens_reused=14336, ttft_limit_s=30.0)
LONG_DOCUMENT = Workload(name="long document", tokens_in=65536, tokens_out=256, ttft_limit_s=300.0)
WORKLOADS: Mapping[str, Workload] = dict(zip(NAMES, (CHAT, CODING_AGENT, LONG_DOCUMENT), strict=True))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Jobs by how often they come; `parts` of positive weights."""

    parts: tuple[tuple[Workload, float], ...]

    @property
    def name(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0][0].name
        return " + ".join(f"{weight:g} {workload.name}" for workload, weight in self.parts)

    @property
    def depth(self) -> int:
        """The mean over the jobs: where plans are compared."""
        whole = sum(weight for _, weight in self.parts)
        return round(sum(workload.depth * weight for workload, weight in self.parts) / whole)


def parse_mix(text: str) -> Mix:
    """ "chat", or "chat:3,agent:1". Raises ValueError that says what is wrong."""
    return Mix(parts=tuple((WORKLOADS[name], weight) for name, weight in parse_jobs(text)))


def only(workload: Workload) -> Mix:
    return Mix(parts=((workload, 1.0),))


def scaled(workload: Workload, context: int) -> Workload:
    """The same proportions inside a smaller context, and its name says so."""
    whole = workload.tokens_in + workload.tokens_out
    if whole <= context:
        return workload
    tokens_in = context * workload.tokens_in // whole
    return replace(
        workload,
        name=f"{workload.name} (scaled to {context})",
        tokens_in=tokens_in,
        tokens_out=context - tokens_in,
        tokens_reused=context * workload.tokens_reused // whole,
    )


def scaled_mix(mix: Mix, context: int) -> Mix:
    return Mix(parts=tuple((scaled(workload, context), weight) for workload, weight in mix.parts))


def ttft_s(curve: Curve, workload: Workload) -> float:
    return curve.prefill_s(workload.tokens_reused, workload.tokens_in)


def job_s(curve: Curve, workload: Workload) -> float:
    """Seconds for one job: what is new is read, and every token decoded at its own depth."""
    return ttft_s(curve, workload) + curve.decode_s(workload.tokens_in, workload.tokens_out)


def cost_s(curve: Curve, mix: Mix) -> float:
    """What plans are compared by: the mean job's seconds, and more for a first token that is later than its limit."""
    whole = sum(weight for _, weight in mix.parts)
    return sum(weight * _limited(curve, workload) for workload, weight in mix.parts) / whole


def _limited(curve: Curve, workload: Workload) -> float:
    return job_s(curve, workload) + excess_s(ttft_s(curve, workload), workload)


def excess_s(ttft_s: float, workload: Workload) -> float:
    """What a first token that is later than its limit counts for, beside the job's own time."""
    limit_s = workload.ttft_limit_s
    return 0.0 if limit_s is None else EXCESS_WEIGHT * max(0.0, ttft_s - limit_s)
