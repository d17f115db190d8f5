"""A tuning that has not ended, as it stands on the volume: kept under the key of the profile that it is to become.

Imported when something is measured, and not by a start from a profile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from appliance.plan import KINDS
from appliance.profile.record import SCHEMA, Key, fields_of, parse_measurement
from appliance.tune.paired import Passage
from appliance.tune.partial import GuessLook, Partial, SlotsLook
from appliance.tune.slots import Concurrency, Job
from appliance.tune.speculate import Answer, Tried
from appliance.tune.workload import Workload

_Part = TypeVar("_Part")


def dump_partial(key: Key, partial: Partial) -> str:
    return json.dumps({"schema": SCHEMA, "key": {"id": key.id}, **asdict(partial)}, sort_keys=True) + "\n"


def parse_partial(text: str, key: Key) -> Partial:
    """Raises ValueError for what `dump_partial` did not write for this key."""
    try:
        document = json.loads(text)
        schema = document["schema"]
        if schema != SCHEMA or isinstance(schema, bool):
            message = f"it has another schema than {SCHEMA}: {schema}"
            raise ValueError(message)
        if document["key"]["id"] != key.id:
            message = "it is for another key"
            raise ValueError(message)
        return Partial(
            measurements=_all(parse_measurement, document["measurements"]),
            passages=_all(_passage, document["passages"]),
            guesses=_all(_guess_look, document["guesses"]),
            slots=_all(_slots_look, document["slots"]),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = f"something is lacking or odd: {type(error).__name__}: {error}"
        raise ValueError(message) from error


def _all(parse: Callable[[dict[str, Any]], _Part], found: Any) -> tuple[_Part, ...]:  # noqa: ANN401
    if not isinstance(found, list):
        message = f"not a list: {found!r:.80}"
        raise TypeError(message)
    return tuple(parse(each) for each in found)


def _passage(data: dict[str, Any]) -> Passage:
    passage = Passage(**{**fields_of(Passage, data), "nll": _all(_number, data["nll"])})
    _require(passage, is_so=passage.piece_tokens > 0 and passage.first >= 0 and 0 <= passage.seconds < math.inf)
    return passage


def _guess_look(data: dict[str, Any]) -> GuessLook:
    tried = data["tried"]
    if tried["kind"] is not None and tried["kind"] not in KINDS:
        message = f"Tried.kind is none of {', '.join(KINDS)}: {tried['kind']!r}"
        raise TypeError(message)
    found = Tried(**{**fields_of(Tried, tried), "answers": _all(_answer, tried["answers"])})
    _require(found, is_so=0 <= found.seconds < math.inf and found.tokens >= 0)
    return GuessLook(**{**fields_of(GuessLook, data), "tried": found})


def _answer(data: dict[str, Any]) -> Answer:
    answer = Answer(**fields_of(Answer, data))
    _require(answer, is_so=answer.made >= 0 and 0 <= answer.ms < math.inf and (answer.ms > 0 or not answer.counts))
    return answer


def _slots_look(data: dict[str, Any]) -> SlotsLook:
    found = data["found"]
    look = SlotsLook(**{**fields_of(SlotsLook, data), "found": None if found is None else _concurrency(found)})
    _require(look, is_so=(look.found is None) == (look.error is not None) and look.slots > 0)
    return look


def _concurrency(data: dict[str, Any]) -> Concurrency:
    jobs = _all(_job, data["jobs"])
    workload = Workload(**fields_of(Workload, data["workload"]))
    found = Concurrency(**{**fields_of(Concurrency, data), "workload": workload, "jobs": jobs})
    _require(found, is_so=bool(jobs) and found.slots > 0 and 0 <= found.load_s < math.inf)
    return found


def _job(data: dict[str, Any]) -> Job:
    job = Job(**fields_of(Job, data))
    times = (job.seconds, job.ttft_s, job.decode_ms)
    _require(job, is_so=all(0 <= time < math.inf for time in times) and job.seconds > 0)
    return job


def _number(found: Any) -> float:  # noqa: ANN401
    if isinstance(found, bool) or not isinstance(found, int | float):
        message = f"not a number: {found!r:.80}"
        raise TypeError(message)
    return found


def _require(found: object, *, is_so: bool) -> None:
    if not is_so:
        message = f"no measuring gives this: {found!r:.200}"
        raise TypeError(message)
