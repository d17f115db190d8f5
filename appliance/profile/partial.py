"""JSON of an unfinished tuning, kept under the key of the profile that it will become.

Imported only when something is measured, so that a start from a profile does not load the tuner.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from appliance.documents import Rules, load, read
from appliance.profile.record import MEASURED, SCHEMA, Key
from appliance.tune.budget import LoadsOfDay
from appliance.tune.checkpoint import Partial, SlotsTrial
from appliance.tune.figures.perplexity import ScoredChunk
from appliance.tune.figures.slots import Concurrency, Job
from appliance.tune.speculate import Answer, Tried


def dump_partial(key: Key, partial: Partial) -> str:
    return json.dumps({"schema": SCHEMA, "key": {"id": key.id}, **asdict(partial)}, sort_keys=True) + "\n"


def parse_partial(text: str, key: Key) -> Partial:
    """Parse the file's content. Raises ValueError if `dump_partial` did not write it for this key."""
    document = load(text)
    schema, of = document.pop("schema", None), document.pop("key", None)
    if schema != SCHEMA:
        message = f"schema is {schema}, expected {SCHEMA}"
        raise ValueError(message)
    if of != {"id": key.id}:
        message = "it is for another key"
        raise ValueError(message)
    return read(Partial, document, rules=_RULES)


def _is_time(*seconds: float) -> bool:
    return all(0 <= each < math.inf for each in seconds)


def _is_answer(answer: Answer) -> bool:
    return answer.made >= 0 and _is_time(answer.ms) and (answer.ms > 0 or not answer.counts)


_RULES: Rules = {
    **MEASURED,
    ScoredChunk: lambda scored_chunk: (
        scored_chunk.chunk_tokens > 0 and scored_chunk.first >= 0 and _is_time(scored_chunk.seconds)
    ),
    Tried: lambda tried: tried.tokens >= 0 and _is_time(tried.seconds),
    Answer: _is_answer,
    SlotsTrial: lambda look: (look.found is None) == (look.error is not None) and look.slots > 0,
    Concurrency: lambda found: bool(found.jobs) and found.slots > 0 and _is_time(found.load_s),
    LoadsOfDay: lambda loads: loads.count >= 0,
    Job: lambda job: _is_time(job.seconds, job.ttft_s, job.decode_ms) and job.seconds > 0,
}
