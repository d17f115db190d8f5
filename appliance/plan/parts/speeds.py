"""Speeds of a plan as numbers, predicted or measured, and the sentences about them.

They hold for one request at a time, without speculative decoding.
"""

from __future__ import annotations

from appliance.values import dataclass


def rate(tokens_per_s: float) -> str:
    """Return a speed for people: "116", or "2.1" below 10."""
    return f"{tokens_per_s:.{0 if tokens_per_s >= 9.95 else 1}f}"


def duration(seconds: float) -> str:
    """Return a predicted time for people: "45 s", "6 min", "1.6 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@dataclass(frozen=True, kw_only=True)
class SpeedAt:
    """Speeds with `depth` tokens in the KV cache.

    `prefill_tokens_per_s` is the mean over the last `prefill_tokens` tokens of the prompt, with the tokens before them
    in the cache; None if no tokens were read. Fewer tokens than a ubatch are read more slowly each.
    `decode_uncertainty` is the relative error of the decode speed; 0.0 if it is no more than usual.
    """

    depth: int
    decode_tokens_per_s: float
    decode_uncertainty: float = 0.0
    prefill_tokens: int
    prefill_tokens_per_s: float | None

    def describe(self) -> str:
        """Return words like "116.0 tok/s" or "0.5 tok/s (within 14 %: few tokens)"."""
        uncertainty = f" (within {100 * self.decode_uncertainty:.0f} %: few tokens)" if self.decode_uncertainty else ""
        return f"{self.decode_tokens_per_s:.1f} tok/s{uncertainty}"


@dataclass(frozen=True, kw_only=True)
class JobSpeed:
    """One job of the workload: a prompt of `tokens_in` tokens, an answer of `tokens_out`.

    `ttft_s`: time to first token of a first turn, which reads the whole prompt into an empty cache: prefill and one
    decode step.
    `job_s`: the whole job, with the first `tokens_reused` tokens of the prompt still in the cache from the turn before.
    `is_extrapolated`: the job ends far beyond the deepest measurement.
    """

    workload: str
    tokens_in: int
    tokens_reused: int
    tokens_out: int
    ttft_s: float
    job_s: float
    is_extrapolated: bool

    def describe(self) -> str:
        """Return words like "a chat job takes 3.1 s"."""
        words = f"a {self.workload} job takes {self.job_s:.1f} s"
        return f"{words} (extrapolated)" if self.is_extrapolated else words


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds of one plan."""

    plan: str  # the plan's key
    at: tuple[SpeedAt, ...]  # by depth, never empty
    jobs: tuple[JobSpeed, ...]  # the workload's jobs, one for each of a mix

    def describe(self) -> str:
        """Return "decodes 116.0 tok/s at 32 tokens of context, 42.1 tok/s at 2,048; a chat job takes 3.1 s"."""
        first, *rest = (f"{speed.describe()} at {speed.depth:,}" for speed in self.at)
        return (
            f"decodes {', '.join((f'{first} tokens of context', *rest))}; {', '.join(j.describe() for j in self.jobs)}"
        )
