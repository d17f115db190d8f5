"""What llama-server's log says of the requests that it served: how many tokens, at which depth, in what time. Pure.

A request, as printed at log verbosity 4 (cut short):

    2.18.220.800 I slot launch_slot_: id  2 | task 99 | processing task, is_child = 0
    2.18.275.826 I slot   operator(): id  2 | task 99 | new prompt, n_ctx_slot = 8192, n_keep = 0, task.n_tokens = 400
    2.39.946.797 I slot print_timing: id  2 | task 99 | prompt eval time =   10867.00 ms /   400 tokens (…
    2.39.946.810 I slot print_timing: id  2 | task 99 |        eval time =   10803.94 ms /    32 tokens (…
    2.39.947.629 I slot      release: id  2 | task 99 | stop processing: n_tokens = 431, truncated = 0

A request that its client gave up has no times, only a release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Where a line of a slot says so: its clock is 12 characters, and more only after ten minutes.
_EARLIEST, _LATEST = 13, 22
_MARK = " slot "
_ALL_IDLE = "update_slots: all slots are idle"
_LINE = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} [A-Z] slot +(\S+): id +(\d+) \| task (\d+) \| *(.*)", re.ASCII)
_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
_COUNT = r"(\d{1,9})"
_PROMPT = re.compile(rf"new prompt, .*\btask\.n_tokens = {_COUNT}$", re.ASCII)
_TIME = re.compile(rf"(prompt )?eval time = +{_NUMBER} ms / +{_COUNT} tokens \(", re.ASCII)
_DRAFTS = re.compile(rf"draft acceptance = [0-9.]+ \( *{_COUNT} accepted / +{_COUNT} generated\)", re.ASCII)
_END = re.compile(rf"stop processing: n_tokens = {_COUNT}, truncated = ([01])$", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Served:
    """One finished request, by the engine's own figures."""

    cached_tokens: int  # of the prompt, what was in the cache and was not read again
    prompt_tokens: int  # of the prompt, what was read
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    drafted_tokens: int = 0  # guessed ahead; of these accepted_tokens are among decode_tokens
    accepted_tokens: int = 0
    was_alone: bool  # no other request was worked on at any moment of it

    @property
    def depth_before(self) -> int:
        """Tokens in the context when decoding began."""
        return self.cached_tokens + self.prompt_tokens

    @property
    def decode_steps(self) -> int:
        """What decode_ms was spent on: the first token comes out of the prefill, an accepted guess costs no step."""
        return max(0, self.decode_tokens - 1 - self.accepted_tokens)


@dataclass
class _Task:
    was_alone: bool
    whole_prompt: int | None = None
    prefill: tuple[float, int] | None = None  # ms, tokens
    decode: tuple[float, int] | None = None
    drafts: tuple[int, int] = (0, 0)  # generated, accepted


@dataclass
class TimingsReader:
    """Of one engine process, since a new one counts tasks from 0 again. Lines that say nothing of it cost a search."""

    begun: int = 0  # how many requests so far
    _tasks: dict[tuple[int, int], _Task] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being worked on."""
        return bool(self._tasks)

    def read(self, line: str) -> Served | None:
        """The request that ends with this line, if one does, and if all of it was seen."""
        if line.find(_MARK, _EARLIEST, _LATEST) < 0:
            if line.endswith(_ALL_IDLE):
                self._tasks.clear()  # whose end was not printed
            return None
        if (found := _LINE.fullmatch(line)) is None:
            return None
        place, words = (int(found[2]), int(found[3])), found[4]
        if found[1] == "launch_slot_" and words.startswith("processing task"):
            self._begin(place)
        elif (task := self._tasks.get(place)) is not None:
            return self._go_on(place, task, words)
        return None

    def _begin(self, place: tuple[int, int]) -> None:
        slot = place[0]
        self.begun += 1
        self._tasks = {other: task for other, task in self._tasks.items() if other[0] != slot}
        for task in self._tasks.values():
            task.was_alone = False
        self._tasks[place] = _Task(was_alone=not self._tasks)

    def _go_on(self, place: tuple[int, int], task: _Task, words: str) -> Served | None:
        if found := _PROMPT.match(words):
            task.whole_prompt = int(found[1])
        elif found := _TIME.match(words):
            figures = float(found[2]), int(found[3])
            if found[1]:
                task.prefill = figures
            else:
                task.decode = figures
        elif found := _DRAFTS.match(words):
            task.drafts = int(found[2]), int(found[1])
        elif found := _END.match(words):
            del self._tasks[place]
            return None if found[2] == "1" else _served(task)
        return None


def _served(task: _Task) -> Served | None:
    """None for what was broken off, which has no times, and for figures that do not add up."""
    if task.whole_prompt is None or task.prefill is None or task.decode is None:
        return None
    (prefill_ms, prompt_tokens), (decode_ms, decode_tokens) = task.prefill, task.decode
    drafted, accepted = task.drafts
    if prompt_tokens > task.whole_prompt or accepted > min(drafted, max(0, decode_tokens - 1)):
        return None
    return Served(
        cached_tokens=task.whole_prompt - prompt_tokens,
        prompt_tokens=prompt_tokens,
        prefill_ms=prefill_ms,
        decode_tokens=decode_tokens,
        decode_ms=decode_ms,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        was_alone=task.was_alone,
    )
