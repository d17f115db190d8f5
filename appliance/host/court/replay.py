"""Sends the jobs of a mix to one build and takes the times that a client sees."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from appliance.errors import EngineNotReadyError
from appliance.host.court.judge import Times
from appliance.host.court.mix import Job, Mix
from appliance.host.docker.http import Gateway, NoAnswerError, unanswered
from appliance.values import dataclass

ROUTE = "/v1/completions"  # without the chat template, which a new build may have changed
# Words that most tokenizers have whole, so that a text has about as many tokens as words.
_WORDS = """
the of and to in is was for that with on as are by at from this be or an have not which one all we can
""".split()  # noqa: SIM905 - a list of words is read as one
_POSTED = re.compile(r'^appliance_requests_total\{method="POST",[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Build:
    """One of the two builds while it answers. `model` is its name there."""

    gateway: Gateway
    model: str

    def ask(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a greedy answer. Raises FatalError if the build refuses or breaks off."""
        whole = {"model": self.model, "temperature": 0, "stream": True, **body}
        try:
            with self.gateway.stream(ROUTE, whole) as events:
                yield from events
        except NoAnswerError as error:
            raise unanswered(error) from error

    def posted(self) -> int:
        """Return the requests so far that asked for work. Raises FatalError."""
        try:
            return round(sum(map(float, _POSTED.findall(self.gateway.metrics()))))
        except NoAnswerError as error:
            raise unanswered(error) from error

    def came_since(self, posted: int, own: int) -> int:
        """Return the requests since `posted` was read, without `own` ones. Raises FatalError."""
        return self.posted() - posted - own

    def running(self) -> int:
        """Return the requests that run now. Raises FatalError."""
        try:
            return round(self.gateway.gauges().get("appliance_requests_in_flight", 0))
        except NoAnswerError as error:
            raise unanswered(error) from error


def warm(build: Build, mix: Mix) -> None:
    """Put the cached part of each job into the build's cache, and let a new engine give its first, slower answers."""
    for number, job in enumerate(job for burst in mix.scaled(0).bursts for job in burst):
        _time(build, job, number, turn=0, began=time.monotonic())


def replay(build: Build, mix: Mix, turn: int) -> Times:
    """Do all jobs once. The texts follow from `turn`, from 1 on: both builds get the same, and neither has cached
    them."""
    prefill_s = decode_s = 0.0
    first = 0
    for burst in mix.bursts:
        began = time.monotonic()
        with ThreadPoolExecutor(len(burst)) as pool:
            asked = [pool.submit(_time, build, job, first + i, turn=turn, began=began) for i, job in enumerate(burst)]
        first += len(burst)
        times = [each.result() for each in asked]
        prefill_s += sum(each.prefill_s for each in times)
        decode_s += sum(each.decode_s for each in times)
    return Times(prefill_s=prefill_s, decode_s=decode_s)


def _time(build: Build, job: Job, number: int, *, turn: int, began: float) -> Times:
    time.sleep(max(0.0, began + job.after_s - time.monotonic()))
    prompt = _text(f"cached {number}", job.cached) + _text(f"{turn} {number}", job.fresh)
    asked = time.monotonic()
    events = [time.monotonic() for _ in build.ask({"prompt": prompt, "max_tokens": job.out, "ignore_eos": True})]
    if len(events) < 2 or events[-1] <= events[0]:
        message = f"an answer of {job.out} tokens came in {len(events)} events, so its speed cannot be measured"
        raise EngineNotReadyError(message, hint="`appliance upgrade --court-s 0` leaves the comparison out")
    return Times(prefill_s=events[0] - asked, decode_s=events[-1] - events[0])


def _text(seed: str, words: int) -> str:
    """Return a text whose first words are its own, so that no cache has its beginning; empty for no words."""
    if not words:
        return ""
    chosen = random.Random(seed)  # noqa: S311 - no secret
    return f"{' '.join(chosen.choices(_WORDS, k=words))} "
