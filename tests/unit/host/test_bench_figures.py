"""The arithmetic of a benchmark: bytes with times -> answers -> rows."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.host.bench.figures import Sample, percentile, row_of, skipped
from appliance.host.bench.prompts import ASKS, Prompts, TokensPerWord, calibrate
from appliance.host.bench.stream import Answer, BrokenAnswerError, Piece, read_answer
from tests.builders import examples  # noqa: F401 - settings of hypothesis are loaded with it

USAGE = {"prompt_tokens": 100, "completion_tokens": 3}


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(words: str = "x", field: str = "content") -> bytes:
    return event(choices=[{"index": 0, "delta": {field: words}, "finish_reason": None}])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
TAIL = END + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"


def pieces(*timed: tuple[float, bytes]) -> list[Piece]:
    return [Piece(at_s=at_s, data=data) for at_s, data in timed]


def answer(*at_s: float, prompt: int = 100, tokens: int | None = None, cached: int = 0) -> Answer:
    made = len(at_s) if tokens is None else tokens
    return Answer(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=made, chunk_at_s=at_s)


def sample(*at_s: float, started_s: float = 0.0, prompt: int = 100, tokens: int | None = None) -> Sample:
    return Sample(started_s=started_s, ended_s=started_s + at_s[-1], answer=answer(*at_s, prompt=prompt, tokens=tokens))


def test_the_role_that_comes_first_is_no_token() -> None:
    found = read_answer(pieces((0.1, ROLE), (0.5, text()), (0.6, text()), (0.7, text() + TAIL)))
    assert found == answer(0.5, 0.6, 0.7)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_reasoning_is_tokens_like_any_other(field: str) -> None:
    assert read_answer(pieces((0.5, text(field=field)), (0.9, TAIL))).chunk_at_s == (0.5,)


def test_a_tool_call_is_tokens() -> None:
    call = event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}])
    assert read_answer(pieces((0.5, call), (0.9, TAIL))).chunk_at_s == (0.5,)


@given(st.data())
def test_however_the_bytes_are_cut_the_tokens_are_the_same(data: st.DataObject) -> None:
    """Each event gets the time of the read that completed it, and none is lost or counted twice."""
    whole = ROLE + text("ä") + b": a comment\n\n" + text("b\\n") + TAIL
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    parts = [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])]
    found = read_answer([Piece(at_s=float(i), data=part) for i, part in enumerate(parts)])
    assert (found.prompt_tokens, found.completion_tokens, len(found.chunk_at_s)) == (100, 3, 2)
    assert list(found.chunk_at_s) == sorted(found.chunk_at_s)


def test_line_ends_of_windows_are_read() -> None:
    assert read_answer(pieces((0.5, (text() + TAIL).replace(b"\n", b"\r\n")))).chunk_at_s == (0.5,)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut before the first token"),
        (ROLE, "cut before the first token"),
        (text() + text(), "cut after 2 chunks"),
        (END + event(choices=[], usage=USAGE), "an answer without a token"),
        (text() + END, "no token counts: the stream has no usage"),
        (
            text() + END + event(choices=[], usage={"prompt_tokens": 1}),
            "no token counts: usage lacks them: prompt_tokens",
        ),
        (text() + END + event(choices=[], usage=[7]), "no token counts: usage is [7]"),
        (text() + event(error={"message": "engine died"}) + TAIL, "the server ended the stream: engine died"),
        (text() + b"data: {what\n\n", "an event is not a JSON object: {what"),
        (text() + b"data: 7\n\n", "an event is not a JSON object: 7"),
    ],
)
def test_what_is_no_whole_answer_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenAnswerError) as error:
        read_answer(pieces((0.1, data)))
    assert str(error.value) == reason


def test_a_row_has_the_figures_of_the_field() -> None:
    """Two requests of 4 tokens: the first token after 0.5 s, then one each 0.1 s; together they take 1.8 s."""
    row = row_of(100, 1, [sample(0.5, 0.6, 0.7, 0.8), sample(0.5, 0.6, 0.7, 0.8, started_s=1.0)])
    assert row.answered == 2
    assert row.prefill_tokens_per_s
    assert row.prefill_tokens_per_s.p50 == pytest.approx(200.0)
    assert row.decode_tokens_per_s
    assert row.decode_tokens_per_s.p50 == pytest.approx(10.0)
    assert row.ttft_ms
    assert row.ttft_ms.p95 == pytest.approx(500.0)
    assert row.inter_token_ms
    assert row.inter_token_ms.mean == pytest.approx(100.0)
    assert row.duration_s == pytest.approx(1.8)
    assert row.throughput_tokens_per_s == pytest.approx(8 / 1.8)


def test_chunks_of_several_tokens_keep_decode_right() -> None:
    row = row_of(100, 1, [sample(1.0, 1.4, 1.8, tokens=9)])
    assert row.decode_tokens_per_s
    assert row.decode_tokens_per_s.mean == pytest.approx(10.0)
    assert row.tokens_per_chunk == 3.0
    assert row.inter_token_ms
    assert row.inter_token_ms.mean == pytest.approx(100.0)
    assert row.inter_token_ms.p50 == pytest.approx(400.0)  # a stall is a gap, whatever is in the chunk after it


def test_a_stall_is_in_p99_and_hardly_in_the_median() -> None:
    times = [1.0 + 0.01 * i + (1.0 if i > 30 else 0.0) for i in range(61)]
    row = row_of(100, 1, [sample(*times)])
    assert row.inter_token_ms
    assert row.inter_token_ms.p50 == pytest.approx(10.0)
    assert row.inter_token_ms.p99 > 400.0


def test_an_answer_of_one_token_has_a_ttft_and_no_decode() -> None:
    row = row_of(100, 1, [sample(0.5)])
    assert row.ttft_ms
    assert row.decode_tokens_per_s is None
    assert row.inter_token_ms is None


def test_failures_are_counted_by_reason_and_are_in_no_figure() -> None:
    bad = [Sample(started_s=0.0, ended_s=9.0, failure="cut after 2 chunks")] * 2
    row = row_of(100, 3, [sample(0.5, 0.6), *bad])
    assert (row.answered, row.failed, row.failures) == (1, 2, {"cut after 2 chunks": 2})
    assert row.duration_s == pytest.approx(0.6)
    nothing = row_of(100, 3, bad)
    assert (nothing.answered, nothing.failed, nothing.ttft_ms) == (0, 2, None)


def test_a_row_that_was_skipped_has_neither_answers_nor_failures() -> None:
    row = skipped(4096, 2, "too long")
    assert (row.answered, row.failed, row.skipped) == (0, 0, "too long")


def test_the_share_from_the_servers_cache_is_told() -> None:
    cached = Sample(started_s=0.0, ended_s=1.0, answer=answer(0.5, 0.6, cached=50))
    assert row_of(100, 1, [cached, sample(0.5, 0.6)]).cached_share == 0.25


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_are_those_of_the_standard_library(values: list[float], share: float) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, share) == pytest.approx(cuts[round(share * 100) - 1], rel=1e-9, abs=1e-6)


def test_no_two_prompts_begin_alike_and_a_seed_gives_the_same_again() -> None:
    prompts, again = Prompts(7), Prompts(7)
    made = [prompts.make(20) for _ in range(200)]
    assert len({prompt[:8] for prompt in made}) == 200
    assert made == [again.make(20) for _ in range(200)]
    assert made[0] != Prompts(8).make(20)


@given(st.integers(1, 5000), st.integers(0, 2**40))
def test_a_prompt_has_as_many_words_as_asked_for(words: int, seed: int) -> None:
    prompt = Prompts(seed).make(words)
    assert prompt.endswith(ASKS)
    assert len(prompt.removesuffix(ASKS).split()) == words + 1


def test_two_requests_say_how_many_words_a_length_is() -> None:
    scale = calibrate((32, 60), (256, 340))
    assert scale == TokensPerWord(overhead=20.0, slope=1.25)
    assert scale.words(1020) == 800
    with pytest.raises(ValueError, match="256 words are 60"):
        calibrate((32, 60), (256, 60))
