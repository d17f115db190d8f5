"""Workloads as jobs: prompt tokens, cached tokens, generated tokens, TTFT limit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT
from appliance.settings import WORKLOADS as NAMES
from appliance.settings import parse_jobs
from appliance.tune.figures.curve import Curve
from appliance.values import dataclass

EXCESS_WEIGHT = 9.0  # in addition to the job's own time: a second beyond the TTFT limit counts as ten


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One job. The first `tokens_reused` of `tokens_in` are still cached from the previous turn."""

    name: str
    tokens_in: int
    tokens_out: int
    tokens_reused: int = 0
    ttft_limit_s: float | None = None

    @property
    def depth(self) -> int:
        """Depth for quoting speed and comparing plans: halfway through the answer."""
        return self.tokens_in + self.tokens_out // 2


# TTFT limits: ten seconds keep a user's attention on a dialogue (Nielsen 1993, Usability Engineering, 5.5). For an
# agent that works alone, and for a long document, users accept more.
CHAT = Workload(name="chat", tokens_in=CHAT_TOKENS_IN, tokens_out=CHAT_TOKENS_OUT, ttft_limit_s=10.0)
# An agent sends its whole history with each turn and adds a file or a tool's answer; an eighth of the prompt is new.
CODING_AGENT = Workload(name="coding agent", tokens_in=16384, tokens_out=512, tokens_reused=14336, ttft_limit_s=30.0)
LONG_DOCUMENT = Workload(name="long document", tokens_in=65536, tokens_out=256, ttft_limit_s=300.0)
WORKLOADS: Mapping[str, Workload] = dict(zip(NAMES, (CHAT, CODING_AGENT, LONG_DOCUMENT), strict=True))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mix of jobs. `parts` are jobs with positive weights, which say how often each one comes."""

    parts: tuple[tuple[Workload, float], ...]

    @property
    def name(self) -> str:
        if len(self.parts) == 1:
            return self.parts[0][0].name
        return " + ".join(f"{weight:g} {workload.name}" for workload, weight in self.parts)

    @property
    def depth(self) -> int:
        """Mean depth of the jobs, at which plans are compared."""
        whole = sum(weight for _, weight in self.parts)
        return round(sum(workload.depth * weight for workload, weight in self.parts) / whole)


def parse_mix(text: str) -> Mix:
    """Parse "chat" or "chat:3,agent:1". Raises ValueError that says what is wrong."""
    return Mix(parts=tuple((WORKLOADS[name], weight) for name, weight in parse_jobs(text)))


def only(workload: Workload) -> Mix:
    return Mix(parts=((workload, 1.0),))


def scaled(workload: Workload, context: int) -> Workload:
    """Return the job scaled down proportionally to a smaller context, which its name then says."""
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
    """Return the seconds of one job: prefill of the new tokens, and decode of each token at its own depth."""
    return ttft_s(curve, workload) + curve.decode_s(workload.tokens_in, workload.tokens_out)


def cost_s(curve: Curve, mix: Mix) -> float:
    """Return the cost by which plans are compared: seconds of the mean job plus a penalty for late first tokens."""
    whole = sum(weight for _, weight in mix.parts)
    return sum(weight * _limited(curve, workload) for workload, weight in mix.parts) / whole


def _limited(curve: Curve, workload: Workload) -> float:
    return job_s(curve, workload) + excess_s(ttft_s(curve, workload), workload)


def excess_s(ttft_s: float, workload: Workload) -> float:
    """Return the penalty for a first token later than its limit, s, in addition to the job's own time."""
    limit_s = workload.ttft_limit_s
    return 0.0 if limit_s is None else EXCESS_WEIGHT * max(0.0, ttft_s - limit_s)
