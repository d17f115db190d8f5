"""The engine's log of requests, as it was printed here, and anything else that may stand in a log."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama_timings import Served, TimingsReader

# llama-server build 11312 with SmolLM2 on a busy machine: eight requests, two of them at once, and one given up.
LOG = Path(__file__).with_name("llama-requests.txt").read_text().splitlines()
# cache_n, prompt_n, prompt_ms, predicted_n, predicted_ms of its replies; of the two at once the last launched is first.
REPLIES = (
    (0, 300, 13260.348, 32, 31402.094),
    (300, 700, 32269.029, 32, 28678.113),
    (999, 1, 506.136, 32, 27075.955),
    (0, 400, 10866.998, 32, 10803.945),
    (0, 310, 18359.182, 32, 21616.893),
    (0, 300, 18359.502, 32, 21617.022),
    (0, 31, 1567.747, 5, 828.011),
    (199, 1, 211.553, 120, 38315.883),
)


def read(lines: Iterable[str]) -> list[Served]:
    reader = TimingsReader()
    return [served for line in lines if (served := reader.read(line)) is not None]


def test_every_reply_of_a_real_log_is_found_with_its_figures() -> None:
    found = read(LOG)
    assert len(found) == len(REPLIES)
    for served, (cached, prompt, prompt_ms, made, made_ms) in zip(found, REPLIES, strict=True):
        assert (served.cached_tokens, served.prompt_tokens, served.decode_tokens) == (cached, prompt, made)
        assert served.prefill_ms == pytest.approx(prompt_ms, abs=0.006)
        assert served.decode_ms == pytest.approx(made_ms, abs=0.006)
        assert served.depth_before == cached + prompt
        assert served.decode_steps == made - 1
    assert [served.was_alone for served in found] == [True] * 4 + [False] * 2 + [True] * 2


def test_a_request_whose_beginning_or_end_was_not_seen_is_none() -> None:
    begin = next(number for number, line in enumerate(LOG) if "processing task" in line)
    end = next(number for number, line in enumerate(LOG) if "stop processing" in line)
    assert len(read(LOG[: end + 1])) == 1
    assert read(LOG[begin + 1 : end + 1]) == []
    assert read(LOG[:end]) == []


def test_it_is_busy_from_the_launch_to_the_end() -> None:
    reader = TimingsReader()
    was_busy, begun = False, []
    for line in LOG:
        reader.read(line)
        begun += [line] if reader.is_busy and not was_busy else []
        was_busy = reader.is_busy
    assert not was_busy
    assert begun == [line for line in LOG if "processing task" in line and " task 133 " not in line]


def lines_of(slot: int, task: int, *extra: str, prompt: int = 40, read: int = 30, made: int = 9) -> list[str]:
    def line(function: str, words: str) -> str:
        return f"12.34.567.890 I slot {function:>12}: id {slot:2} | task {task} | {words}"

    rates = "(    1.00 ms per token,     1.00 tokens per second)"
    return [
        line("launch_slot_", "processing task, is_child = 0"),
        line("operator()", f"new prompt, n_ctx_slot = 64, n_keep = 0, task.n_tokens = {prompt}"),
        line("print_timing", f"prompt eval time = {task:10}.25 ms / {read:5} tokens {rates}"),
        line("print_timing", f"       eval time = {task:10}.50 ms / {made:5} tokens {rates}"),
        *(line("print_timing", words) for words in extra),
        line("release", f"stop processing: n_tokens = {prompt + made}, truncated = 0"),
    ]


def served(task: int, *, was_alone: bool) -> Served:
    return Served(
        cached_tokens=10,
        prompt_tokens=30,
        prefill_ms=task + 0.25,
        decode_tokens=9,
        decode_ms=task + 0.5,
        was_alone=was_alone,
    )


def test_guessed_tokens_are_counted_and_accepted_ones_cost_no_step() -> None:
    words = "draft acceptance = 0.60000 (    3 accepted /     5 generated), mean len =  1.60"
    (found,) = read(lines_of(0, 7, words))
    assert (found.drafted_tokens, found.accepted_tokens, found.decode_steps) == (5, 3, 5)


@pytest.mark.parametrize(
    "lines",
    [
        lines_of(0, 7, prompt=20),
        lines_of(0, 7, "draft acceptance = 0.60000 (    6 accepted /     5 generated), mean len =  1.60"),
        lines_of(0, 7, "draft acceptance = 0.60000 (    9 accepted /    20 generated), mean len =  1.60"),
        [line.replace("truncated = 0", "truncated = 1") for line in lines_of(0, 7)],
        [line.replace("task 7", "task -1") for line in lines_of(0, 7)],
        [line.replace("I slot", "slot") for line in lines_of(0, 7)],
        [f"[proxy] {line}" for line in lines_of(0, 7)],
    ],
)
def test_what_does_not_add_up_or_is_not_of_this_engine_is_none(lines: list[str]) -> None:
    assert read(lines) == []


def test_a_slot_that_begins_anew_or_an_engine_that_is_idle_has_no_other_request() -> None:
    """A release that was lost does not make all that follow look accompanied."""
    assert read([*lines_of(0, 1)[:-1], *lines_of(0, 2)]) == [served(2, was_alone=True)]
    idle = "12.34.567.890 I srv  update_slots: all slots are idle"
    assert read([*lines_of(0, 1)[:-1], idle, *lines_of(1, 2)]) == [served(2, was_alone=True)]
    assert read([*lines_of(0, 1)[:-1], *lines_of(1, 2)]) == [served(2, was_alone=False)]


@given(st.data())
def test_interleaved_requests_are_told_apart_and_none_is_invented(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 4), "slots")
    waiting = {slot: lines_of(slot, 100 + slot) for slot in range(slots)}
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    mixed: list[str] = []
    while waiting:
        slot = data.draw(st.sampled_from(sorted(waiting)), "next")
        began.setdefault(slot, len(mixed))
        mixed.append(waiting[slot].pop(0))
        if data.draw(st.booleans(), "noise"):
            mixed.append(
                data.draw(st.sampled_from(["", "x" * 9000, "12.34.567.890 W srv  stop: cancel task, id_task = 9"]))
            )
        if not waiting[slot]:
            ended[slot] = len(mixed)
            del waiting[slot]
    found = read(mixed)
    overlapping = {a for a, b in permutations(range(slots), 2) if began[a] < ended[b] and began[b] < ended[a]}
    assert found == [
        served(100 + slot, was_alone=slot not in overlapping) for slot in sorted(ended, key=lambda slot: ended[slot])
    ]


CHANGED = st.builds(
    lambda number, at, text: LOG[number][: at % len(LOG[number])] + text + LOG[number][at % len(LOG[number]) + 1 :],
    st.integers(0, len(LOG) - 1),
    st.integers(0, 300),
    st.text(max_size=3),
)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from(LOG), CHANGED), max_size=40))
def test_any_lines_never_raise_and_every_request_has_all_its_lines(lines: list[str]) -> None:
    found = read(lines)
    assert len(found) <= sum("stop processing" in line for line in lines)
    for one in found:
        assert one.cached_tokens >= 0
        assert one.prompt_tokens >= 0
        assert f"{one.prompt_tokens:5} tokens" in "".join(lines)
        assert f"{one.decode_tokens:5} tokens" in "".join(lines)
        assert 0 <= one.accepted_tokens <= one.drafted_tokens
