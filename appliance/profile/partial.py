"""What a tuning that has not ended has found out so far, as it stands on the volume.

Kept under the key of the profile that it is to become, so model, build, machine and settings are the same; beside that
each part says of which plan it is. Imported when something is measured, and not by a start from a profile.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from appliance.documents import Rules, load, read
from appliance.profile.record import MEASURED, SCHEMA, Key
from appliance.tune.measurement import Measurement
from appliance.tune.paired import Passage
from appliance.tune.slots import Concurrency, Job
from appliance.tune.speculate import Answer, Tried


@dataclass(frozen=True, kw_only=True)
class GuessLook:
    """One start of those that choose how far to guess ahead for the plan of this key. All of one plan were asked the
    same prompts, with answers as long as those of the first."""

    key: str
    tried: Tried


@dataclass(frozen=True, kw_only=True)
class SlotsLook:
    """One number of slots for the plan of this name, guesses and all. Only those with the same workload are compared.
    Without `found` the engine ended, with `error`."""

    key: str
    slots: int
    found: Concurrency | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Partial:
    """In the order in which it was found. Verdicts on types of the KV cache are not among it: they are reckoned again
    from the passages of text, so that one for lack of time is never taken for one that was measured."""

    measurements: tuple[Measurement, ...] = ()
    passages: tuple[Passage, ...] = ()
    guesses: tuple[GuessLook, ...] = ()
    slots: tuple[SlotsLook, ...] = ()

    def in_words(self) -> str:
        """As in "3 measurements, 24 chunks of text, 2 trials of speculative decoding"; empty where there is nothing."""
        pieces = sum(len(passage.nll) for passage in self.passages)
        counts = {
            "measurement": len(self.measurements),
            "chunk of text": pieces,
            "trial of speculative decoding": len(self.guesses),
            "trial of slots": len(self.slots),
        }
        named = ((count, *name.partition(" ")) for name, count in counts.items() if count)
        return ", ".join(f"{count} {what}{'s' * (count > 1)}{space}{rest}" for count, what, space, rest in named)


def dump_partial(key: Key, partial: Partial) -> str:
    return json.dumps({"schema": SCHEMA, "key": {"id": key.id}, **asdict(partial)}, sort_keys=True) + "\n"


def parse_partial(text: str, key: Key) -> Partial:
    """Raises ValueError for what `dump_partial` did not write for this key."""
    document = load(text)
    schema, of = document.pop("schema", None), document.pop("key", None)
    if schema != SCHEMA:
        message = f"it has another schema than {SCHEMA}: {schema}"
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
    Passage: lambda passage: passage.piece_tokens > 0 and passage.first >= 0 and _is_time(passage.seconds),
    Tried: lambda tried: tried.tokens >= 0 and _is_time(tried.seconds),
    Answer: _is_answer,
    SlotsLook: lambda look: (look.found is None) == (look.error is not None) and look.slots > 0,
    Concurrency: lambda found: bool(found.jobs) and found.slots > 0 and _is_time(found.load_s),
    Job: lambda job: _is_time(job.seconds, job.ttft_s, job.decode_ms) and job.seconds > 0,
}
