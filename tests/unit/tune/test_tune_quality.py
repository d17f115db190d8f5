"""Which types of the KV cache a plan may take, and what two runs over one text say of a smaller one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from appliance.engines.engine import ChunkSpec, Install
from appliance.engines.llama.planning.memory.kv_types import (
    BELOW_Q8,
    MIXED,
    TRUSTED,
    kv_candidates,
    unjudged,
    worth_checking,
)
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import parse_flags
from appliance.engines.llama.process.perplexity import Perplexity, Table, arguments
from appliance.plan import KvCheck, Plan
from appliance.settings import Settings, resolve_settings
from appliance.tune.figures.perplexity import (
    CHUNKS_MIN,
    LIMIT,
    ScoredChunk,
    extent_for,
    judge,
    next_gap,
    percent,
    perplexity,
    t_975,
)
from appliance.tune.trials.kv_quality import TEXT
from tests.builders import ENGINE, IMAGE, LARGE, SMALL, machine

EXTENT = ChunkSpec(chunk_tokens=512, chunks=24)
Q4 = KvCheck(kv_type="q4_0", is_accepted=True, why="accepted, it costs less than 1 %: perplexity +0.30 %")
# Of the pinned engine: SmolLM2, 4 pieces of 256 tokens.
PRINTED = """\
0.00.157.896 I cmn          init: llama threadpool init, n_threads = 2
0.00.158.026 I perplexity: tokenizing the input ..
0.00.161.741 I perplexity: tokenization took 3.71 ms
0.00.161.771 I perplexity: calculating perplexity over 4 chunks, n_ctx=256, batch_size=256, n_seq=1
0.01.666.812 I perplexity: 1.51 seconds per pass - ETA 0.10 minutes
       0  52.0793  3.952768  0.276283
     256  49.6736  3.905474  0.188431
     512  47.5386  3.861542  0.153249
     768  53.3667  3.977187  0.133598

0.08.862.879 I Final estimate: PPL = 53.3667 +/- 7.12971
"""


def settings(**flags: str) -> Settings:
    return resolve_settings(flags, {})


def parse_reading(lines: Iterable[str]) -> Table:
    found = Table()
    for line in lines:
        found.add(line)
    return found


def chosen() -> Plan:
    return Space(settings(), IMAGE, ENGINE, machine(), SMALL).best


def table(nll: list[float], step: int = 512) -> list[str]:
    means = [sum(nll[: at + 1]) / (at + 1) for at in range(len(nll))]
    head = f"0.00.161.771 I perplexity: calculating perplexity over {len(nll)} chunks, n_ctx={step}, batch_size={step}"
    return [head, *(f"{at * step:8d}  {math.exp(m):.4f}  {m:4f}  {0.1:4f}" for at, m in enumerate(means))]


def pairs(differences: list[float]) -> list[tuple[float, float]]:
    exact = [3.0 + math.sin(at) for at in range(len(differences))]
    return [(base, base + d) for base, d in zip(exact, differences, strict=True)]


def test_the_mean_of_each_piece_is_read_out_of_the_running_means() -> None:
    found = parse_reading(PRINTED.splitlines())
    assert found.chunks == 4
    assert found.nll == pytest.approx((3.952768, 3.858180, 3.773678, 4.324122), abs=1e-5)
    assert math.exp(sum(found.nll) / 4) == pytest.approx(53.3667, abs=1e-3)


@given(st.lists(st.floats(0.01, 12.0), min_size=1, max_size=100), st.sampled_from([256, 512, 2048]))
def test_what_is_read_is_what_was_printed(nll: list[float], step: int) -> None:
    found = parse_reading(table(nll, step))
    assert found.chunks == len(nll)
    assert found.nll == pytest.approx(nll, abs=2e-4)
    cut = parse_reading(table(nll, step)[:-1])
    assert cut.nll == found.nll[:-1]


@given(st.lists(st.text(max_size=60), max_size=20))
def test_any_lines_are_read_without_an_error(lines: list[str]) -> None:
    assert parse_reading(lines).nll == ()
    # Nor do they hide in a table: a row counts only where it is due.
    assume(not any("perplexity over" in line for line in lines))
    assert parse_reading([*table([3.0, 2.0]), *lines]).nll == pytest.approx((3.0, 2.0), abs=1e-5)


def test_a_table_with_a_hole_or_without_a_head_ends_there() -> None:
    rows = table([3.0, 2.0, 4.0])
    assert len(parse_reading([*rows[:2], *rows[3:]]).nll) == 1
    headless = parse_reading(rows[1:])
    assert (headless.chunks, headless.nll) == (None, ())
    assert math.isnan(parse_reading([rows[0], "       0  nan  -nan   nan"]).nll[0])


def test_the_command_reads_as_the_plan_would_and_asks_for_nothing_unknown() -> None:
    argv = arguments(replace(chosen(), kv_type="q4_0"), ENGINE, TEXT, EXTENT)
    pairs = dict(pairwise(argv))
    assert pairs["--cache-type-k"] == pairs["--cache-type-v"] == "q4_0"
    assert pairs["--ctx-size"] == pairs["--batch-size"] == pairs["--ubatch-size"] == "512"
    assert pairs["--chunks"] == "24"
    assert pairs["--flash-attn"] == "on"
    own = {"--chunks", "--ppl-output-type", "--file"}  # the others are the server's, too
    assert {word for word in argv if word.startswith("--")} - own <= set(ENGINE.flags)
    assert parse_flags("--chunks N   x\n") == ("--chunks",)


async def test_the_program_is_never_ready_and_gets_a_small_environment() -> None:
    install = Install(engine_dir=Path("/opt/llama"), facts=ENGINE, cache_dir=Path("/c"), stall_timeout_s=9.0)
    found = Perplexity(chosen(), install, EXTENT, TEXT).command
    assert found.argv[0] == "/opt/llama/llama-perplexity"
    assert found.socket_path is None
    assert dict(found.environment) == {"PATH": "/usr/bin:/bin", "HOME": "/c/home", "LANG": "C.UTF-8"}
    assert not await found.is_ready()


@pytest.mark.parametrize(
    ("freedom", "expected"), [(4, 2.7764), (11, 2.2010), (15, 2.1314), (30, 2.0423), (120, 1.9799)]
)
def test_students_t(freedom: int, expected: float) -> None:
    assert t_975(freedom) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("shift", "noise", "is_accepted", "words"),
    [
        (0.002, 0.005, True, "accepted, it costs less than 1 %"),
        (-0.002, 0.005, True, "accepted, it costs less than 1 %"),
        (0.030, 0.005, False, "refused, it costs more than 1 %"),
        (0.008, 0.010, False, "refused, inconclusive"),
        (0.012, 0.010, False, "refused, inconclusive"),
        (0.000, 0.100, False, "refused, inconclusive"),
    ],
)
def test_only_what_is_surely_below_the_limit_is_accepted(
    shift: float, noise: float, is_accepted: bool, words: str
) -> None:
    found = judge("q4_0", EXTENT, pairs([shift + noise * (-1) ** at for at in range(24)]))
    assert found.is_accepted is is_accepted
    assert words in found.why
    assert found.difference == pytest.approx(shift)
    assert found.standard_error == pytest.approx(noise / math.sqrt(23), rel=1e-3)
    assert (found.chunks, found.tokens) == (24, 24 * 255)


@given(st.lists(st.floats(-0.05, 0.05), min_size=CHUNKS_MIN, max_size=60), st.floats(0.0, 0.05))
def test_more_harm_is_never_accepted_where_less_was_refused(differences: list[float], more: float) -> None:
    less, worse = (
        judge("q4_0", EXTENT, pairs(list(found))) for found in (differences, [d + more for d in differences])
    )
    assert worse.is_accepted <= less.is_accepted
    for found in (less, worse):
        assert found.difference is not None
        assert not found.is_accepted or found.difference < LIMIT


def test_what_is_too_little_or_no_number_is_refused() -> None:
    few = judge("q4_0", EXTENT, pairs([0.0] * (CHUNKS_MIN - 1)))
    assert not few.is_accepted
    assert f"{CHUNKS_MIN - 1} chunks of at least {CHUNKS_MIN}" in few.why
    assert few.difference is None
    odd = judge("q4_0", EXTENT, pairs([0.0] * 20 + [math.nan]))
    assert not odd.is_accepted
    assert "not finite numbers" in odd.why


def test_a_change_is_of_the_perplexity() -> None:
    assert percent(LIMIT) == "+1.00 %"
    assert percent(-LIMIT) == "-0.99 %"
    assert percent(1e6).endswith(" %")


@given(st.floats(1.0, 3600.0), st.floats(1.0, 1e5), st.integers(256, 200_000))
def test_what_is_read_fits_the_seconds_and_the_text(seconds: float, prefill: float, context: int) -> None:
    text_bytes = TEXT.stat().st_size
    found = extent_for(seconds=seconds, prefill_tokens_per_s=prefill, text_bytes=text_bytes, context=context)
    if found is None:
        return
    assert found.chunk_tokens <= context
    assert found.chunks >= CHUNKS_MIN
    assert found.read * 4.4 < text_bytes  # SmolLM2's tokens of this text are 4.4 bytes
    assert 2 * found.read / prefill <= seconds


def scored_chunk(first: int, nll: list[float], key: str = "f16") -> ScoredChunk:
    return ScoredChunk(key=key, chunk_tokens=256, first=first, nll=tuple(nll))


def test_only_passages_with_the_same_beginning_are_paired() -> None:
    """Two chunks have the same tokens only if their passages begin at the same place."""
    exact = [scored_chunk(0, [1.0, 2.0, 3.0]), scored_chunk(2, [3.5, 4.5]), scored_chunk(5, [6.0])]
    other = [scored_chunk(0, [1.1, 2.1], "q4_0"), scored_chunk(2, [3.6], "q4_0"), scored_chunk(3, [4.6, 5.6], "q4_0")]
    assert perplexity(exact, other) == {0: (1.0, 1.1), 1: (2.0, 2.1), 2: (3.5, 3.6)}
    assert perplexity(exact, []) == perplexity([], other) == {}


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_gaps_are_filled_from_the_first_on(there: set[int], chunks: int) -> None:
    gap = next_gap(there, chunks)
    assert not set(gap) & there
    assert set(range(gap.start)) <= there
    assert gap.stop <= chunks
    assert gap.stop == chunks or gap.stop in there
    assert bool(gap) == bool(set(range(chunks)) - there)


@given(st.integers(1, 24), st.lists(st.integers(0, 30), max_size=200))
def test_any_row_of_broken_off_runs_comes_to_its_end(chunks: int, stretches: list[int]) -> None:
    """Runs are asked for as in `kv_quality.check`: a gap is read with f16 first, then with the other type. A stretch is
    the number of chunks that can be read before the check breaks off. Two useful reads give at least one pair."""
    exact: list[ScoredChunk] = []
    other: list[ScoredChunk] = []
    useful = 0
    for stretch in stretches:
        while stretch and (gap := next_gap(perplexity(exact, other), chunks)):
            begun = max((len(p.nll) for p in exact if p.first == gap.start), default=0)
            read = min(stretch, len(gap), begun or len(gap))
            (other if begun else exact).append(scored_chunk(gap.start, [0.0] * read))
            useful, stretch = useful + 1, stretch - read
    done = len(perplexity(exact, other))
    assert done == chunks or done >= useful // 2


def test_more_seconds_buy_longer_pieces_once_there_are_enough() -> None:
    def of(seconds: float, context: int = 8192) -> ChunkSpec | None:
        return extent_for(seconds=seconds, prefill_tokens_per_s=1000.0, text_bytes=146_919, context=context)

    assert of(9.0) is None
    assert of(10.0) == ChunkSpec(chunk_tokens=256, chunks=12)
    assert of(40.0) == ChunkSpec(chunk_tokens=512, chunks=25)
    assert of(600.0) == ChunkSpec(chunk_tokens=1024, chunks=28)
    assert of(600.0, context=300) == ChunkSpec(chunk_tokens=256, chunks=114)
    assert of(600.0, context=200) is None


def test_the_text_is_long_plain_and_its_source_is_told() -> None:
    text = TEXT.read_text(encoding="ascii")
    assert 60_000 < len(text) < 200_000
    assert len(text.split("\n\n")) == 24
    assert "Public Domain" in TEXT.with_suffix(".md").read_text()


def test_smaller_types_are_candidates_only_when_asked_for_or_proven() -> None:
    assert kv_candidates(settings(), ENGINE, SMALL, on_gpu=False) == TRUSTED
    assert kv_candidates(settings(kv_type="q4_0"), ENGINE, SMALL, on_gpu=False) == ("q4_0",)
    kv_checks = (Q4, replace(Q4, kv_type="q5_1"), replace(Q4, kv_type="q5_0", is_accepted=False))
    assert kv_candidates(settings(), ENGINE, SMALL, kv_checks, on_gpu=False) == (*TRUSTED, "q5_1", "q4_0")
    assert unjudged(settings(), ENGINE, SMALL, kv_checks, on_gpu=False) == ("q4_1", "iq4_nl")
    assert unjudged(settings(kv_type="f16"), ENGINE, SMALL, on_gpu=False) == ()


def test_a_type_that_the_engine_or_the_heads_refuse_is_no_candidate() -> None:
    odd = replace(SMALL, key_length=80, value_length=80)
    assert kv_candidates(settings(), ENGINE, odd, (Q4,), on_gpu=False) == ("f16",)
    lacking = replace(ENGINE, kv_types=("f16", "q8_0"))
    assert kv_candidates(settings(), lacking, SMALL, (Q4,), on_gpu=False) == TRUSTED
    pairs = replace(ENGINE, kv_pairs=(("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")))
    assert unjudged(settings(), pairs, SMALL, on_gpu=True) == ("q4_0",)
    assert unjudged(settings(), pairs, SMALL, on_gpu=False) == tuple(kind for kind in BELOW_Q8 if kind != MIXED)


def test_a_check_is_worth_it_only_for_a_much_larger_window_that_is_wanted() -> None:
    carried = {"f16": 5000, "q8_0": 10_000, "q5_1": 14_000, "q4_1": 17_000, "q4_0": 19_000, "iq4_nl": 19_000}
    assert worth_checking(carried, enough=10_000) == ()
    assert worth_checking(carried, enough=11_500) == ()
    assert worth_checking(carried, enough=32_768) == ("iq4_nl", "q4_0", "q4_1", "q5_1")
    assert worth_checking(carried, enough=14_000) == ("q5_1", "q4_1", "iq4_nl", "q4_0")  # all carry it: the most exact
    assert worth_checking({**carried, "q4_0": 11_999, "iq4_nl": 0, "q4_1": 0, "q5_1": 0}, enough=32_768) == ()
    assert worth_checking({"f16": 0, "q8_0": 0, "q4_0": 512}, enough=8192) == ("q4_0",)


@given(st.dictionaries(st.sampled_from((*TRUSTED, *BELOW_Q8)), st.integers(0, 200_000)), st.integers(1, 200_000))
def test_whatever_is_worth_a_check_carries_more_than_what_may_be_used(carried: dict[str, int], enough: int) -> None:
    have = max((carried[kind] for kind in TRUSTED if kind in carried), default=0)
    for kind in worth_checking(carried, enough=enough):
        assert kind in BELOW_Q8
        assert have < enough
        assert carried[kind] >= 1.2 * have


def test_a_proven_type_carries_a_larger_window_and_says_its_proof() -> None:
    tight = machine(total_mib=7500)
    before = Space(settings(fill_minutes="0"), IMAGE, ENGINE, tight, LARGE).best
    assert before.kv_type == "q8_0"
    kinds = Space(settings(fill_minutes="0"), IMAGE, ENGINE, tight, LARGE).kinds_to_check()
    assert "q4_0" in kinds
    after = Space(settings(fill_minutes="0"), IMAGE, ENGINE, tight, LARGE, kv_checks=(Q4,)).best
    assert after.kv_type == "q4_0"
    assert after.context > 1.3 * before.context
    reason = next(choice.reason for choice in after.choices if choice.name == "kv_type")
    assert f"q8_0 would carry only {before.context:,} tokens" in reason
    assert reason.endswith(Q4.why)
    refused = replace(Q4, is_accepted=False)
    assert Space(settings(fill_minutes="0"), IMAGE, ENGINE, tight, LARGE, kv_checks=(refused,)).best == before
    assert (
        "q4_0"
        not in Space(settings(fill_minutes="0"), IMAGE, ENGINE, tight, LARGE, kv_checks=(refused,)).kinds_to_check()
    )


def test_no_exactness_is_given_up_where_q8_0_carries_enough() -> None:
    roomy = machine(total_mib=11000)
    without = Space(settings(fill_minutes="0"), IMAGE, ENGINE, roomy, LARGE).best
    assert 32_768 <= without.context < LARGE.native_context
    assert Space(settings(fill_minutes="0"), IMAGE, ENGINE, roomy, LARGE, kv_checks=(Q4,)).best == without
    assert Space(settings(fill_minutes="0"), IMAGE, ENGINE, roomy, LARGE).kinds_to_check() == ()
    assert "q4_0" in Space(settings(mode="context", fill_minutes="0"), IMAGE, ENGINE, roomy, LARGE).kinds_to_check()
    for asked in (settings(kv_type="f16"), settings(allow_disk="on")):
        assert Space(asked, IMAGE, ENGINE, machine(total_mib=9000), LARGE).kinds_to_check() == ()


def test_a_window_that_was_asked_for_is_kept_in_the_most_exact_type_that_carries_it() -> None:
    tight = machine(total_mib=7500)
    asked = settings(ctx_size="8192")
    assert Space(asked, IMAGE, ENGINE, tight, LARGE, kv_checks=(Q4,)).best.kv_type in TRUSTED
