from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tune.figures.curve import Curve, Point
from appliance.tune.figures.workload import (
    CHAT,
    CODING_AGENT,
    EXCESS_WEIGHT,
    LONG_DOCUMENT,
    Workload,
    cost_s,
    job_s,
    only,
    parse_mix,
    scaled,
    scaled_mix,
    ttft_s,
)

FLAT = Curve(points=(Point(depth=512, decode_ms=20.0, prefill_ms=2.0, prefill_tokens=512),))


def test_a_job_reads_what_is_new_and_decodes_its_answer() -> None:
    assert job_s(FLAT, CHAT) == pytest.approx(512 * 0.002 + 256 * 0.020)
    assert ttft_s(FLAT, CODING_AGENT) == pytest.approx((16384 - 14336) * 0.002)  # the prefix is in the cache


def test_a_first_token_beyond_its_limit_counts_tenfold() -> None:
    limited = replace(CHAT, ttft_limit_s=0.5)
    late = ttft_s(FLAT, CHAT) - 0.5
    assert cost_s(FLAT, only(limited)) == pytest.approx(job_s(FLAT, CHAT) + EXCESS_WEIGHT * late)
    assert cost_s(FLAT, only(replace(CHAT, ttft_limit_s=60.0))) == pytest.approx(job_s(FLAT, CHAT))


def test_a_mix_is_the_mean_job() -> None:
    mix = parse_mix("chat:3, agent:1")
    assert mix.name == "3 chat + 1 coding agent"
    assert cost_s(FLAT, mix) == pytest.approx((3 * job_s(FLAT, CHAT) + job_s(FLAT, CODING_AGENT)) / 4)
    assert mix.depth == round((3 * CHAT.depth + CODING_AGENT.depth) / 4)
    assert parse_mix("document") == only(LONG_DOCUMENT)


@pytest.mark.parametrize("text", ["", "chats", "chat:", "chat:0", "chat:-1", "chat:inf", "chat:many", "chat,,agent"])
def test_a_mix_that_cannot_be_says_which_word_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no workload of chat, agent, document|has a weight that is not"):
        parse_mix(text)


def test_a_workload_longer_than_the_window_is_scaled_and_says_so() -> None:
    job = scaled(LONG_DOCUMENT, 8192)
    assert job.tokens_in + job.tokens_out == 8192
    assert job.name == "long document (scaled to 8192)"
    assert scaled_mix(only(CHAT), 8192) == only(CHAT)


jobs = st.builds(Workload, name=st.just("w"), tokens_in=st.integers(1, 20_000), tokens_out=st.integers(1, 4000))


@given(jobs, st.floats(0, 1), st.integers(256, 30_000))
def test_a_scaled_job_fits_its_window_and_keeps_what_it_reuses_below_what_it_reads(
    job: Workload, share: float, context: int
) -> None:
    found = scaled(replace(job, tokens_reused=int(share * job.tokens_in)), context)
    assert 0 < found.tokens_in + found.tokens_out <= context
    assert 0 <= found.tokens_reused <= found.tokens_in
