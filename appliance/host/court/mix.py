"""The jobs that both builds do: lengths and timing of requests that the appliance served, never their text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from appliance.values import dataclass

BURSTS = 3  # one at each sixth, half and five sixths of the recorded bursts, by their size
MOST_AT_ONCE = 8
PASS_S = 4.0  # a pass that is longer gives too few pairs in three minutes
LEAST_FRESH, LEAST_OUT = 8, 8
MOST_CACHED = 4096  # both builds have to read it once; on a CPU more would take minutes
DEFAULT_IN, DEFAULT_OUT = 512, 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request: it begins `after_s` after its burst, reads `cached` tokens from the cache and `fresh` ones anew, and
    writes `out` tokens."""

    after_s: float
    cached: int
    fresh: int
    out: int


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Requests in bursts: those of one burst run at the same time, as recorded, and the next burst begins when all of
    them have ended. Pauses between bursts are left out."""

    bursts: tuple[tuple[Job, ...], ...]
    source: str  # in words

    def scaled(self, share: float) -> Mix:
        """Return the mix with this share of the tokens that take time. Cached tokens stay: they set the depth of
        decode."""
        if share >= 1:
            return self
        bursts = tuple(tuple(_shortened(job, share) for job in burst) for burst in self.bursts)
        return Mix(bursts=bursts, source=f"{self.source}, shortened to {share:.0%}")


def _shortened(job: Job, share: float) -> Job:
    fresh, out = max(LEAST_FRESH, round(job.fresh * share)), max(LEAST_OUT, round(job.out * share))
    return replace(job, after_s=job.after_s * share, fresh=fresh, out=out)


def mix_of(rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> Mix:
    """Return the mix of these rows of the request log. Without any it is the mean request of `total`, the sums of the
    usage document, and without these a default."""
    bursts = sorted(_bursts(rows), key=lambda burst: sum(job.fresh + job.out for job in burst))
    if bursts:
        places = dict.fromkeys(len(bursts) * (2 * i + 1) // (2 * BURSTS) for i in range(BURSTS))
        taken = [bursts[place] for place in places]
        at_once = max(map(len, taken))
        words = f"{sum(map(len, taken))} of {sum(map(len, bursts))} recorded requests, up to {at_once} at once"
        return Mix(bursts=tuple(map(tuple, taken)), source=words)
    counted = (total.get("requests") or 0) - (total.get("uncounted") or 0)
    if counted > 0 and total.get("tokens_in") and total.get("tokens_out"):
        cached = (total.get("tokens_cached") or 0) // counted
        job = _job(0.0, total["tokens_in"] // counted, cached, total["tokens_out"] // counted)
        return Mix(bursts=((job,),), source=f"the mean of {counted} requests of the last days")
    job = _job(0.0, DEFAULT_IN, 0, DEFAULT_OUT)
    return Mix(bursts=((job,),), source=f"no request is recorded: {DEFAULT_IN} tokens in, {DEFAULT_OUT} out")


def _bursts(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[Job]]:
    """Yield groups of requests that ran at the same time, with their offsets."""
    counted = [row for row in rows if row.get("tokens_in") and row.get("tokens_out") and row.get("status") == 200]
    burst: list[Job] = []
    began = ends = 0.0
    for row in sorted(counted, key=lambda row: float(row["time"])):
        if burst and (row["time"] >= ends or len(burst) == MOST_AT_ONCE):
            yield burst
            burst = []
        if not burst:
            began = ends = row["time"]
        burst.append(_job(row["time"] - began, row["tokens_in"], row.get("tokens_cached") or 0, row["tokens_out"]))
        ends = max(ends, row["time"] + row["seconds"])
    if burst:
        yield burst


def _job(after_s: float, tokens_in: int, cached: int, out: int) -> Job:
    fresh = max(LEAST_FRESH, tokens_in - cached)
    return Job(
        after_s=after_s, cached=min(MOST_CACHED, max(0, tokens_in - fresh)), fresh=fresh, out=max(LEAST_OUT, out)
    )
