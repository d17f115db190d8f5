"""Which slot counts are measured, what their figures become, and which is taken. No engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.api.client import parse_completion
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.errors import EngineNotReadyError
from appliance.plan import Plan
from appliance.settings import resolve_settings
from appliance.tune.figures.slots import Concurrency, Job, choose, counts, with_slots
from appliance.tune.figures.workload import CHAT, CODING_AGENT, Workload
from appliance.tune.trials.concurrency import job_of
from tests.builders import ENGINE, IMAGE, SMALL, machine


def planned(**flags: str) -> Plan:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(), SMALL).best


def seen(slots: int, *seconds: float, ttft_s: float = 1.0, workload: Workload = CHAT) -> Concurrency:
    jobs = tuple(
        Job(seconds=s, ttft_s=min(s, ttft_s), decode_ms=10.0, tokens_read=512, tokens_cached=0) for s in seconds
    )
    return Concurrency(slots=slots, workload=workload, jobs=jobs)


@pytest.mark.parametrize(
    ("users", "expected"),
    [(1, (4,)), (2, (4, 1)), (3, (4, 2, 1)), (4, (5, 2, 1)), (16, (17, 8, 4))],
)
def test_counts_that_tell_something(users: int, expected: tuple[int, ...]) -> None:
    assert counts(planned(users=str(users)), users) == expected


def test_users_do_not_queue_where_the_cache_would_lose_their_conversations() -> None:
    small = planned(users="8", cache_ram_mib="16")
    assert launch_of(small).idle_slots_stay
    assert counts(small, 8) == (9,)


@given(st.integers(1, 256))
def test_counts_fall_and_hold_the_planned(users: int) -> None:
    plan_of = replace(planned(), parallel=max(4, users + 1))
    found = counts(plan_of, users)
    assert found[0] == plan_of.parallel
    assert list(found) == sorted(set(found), reverse=True)
    assert all(1 <= count < users for count in found[1:])
    assert users not in found[1:]


def test_figures_of_two_users() -> None:
    one = Concurrency(
        slots=3,
        workload=replace(CHAT, tokens_out=100),
        jobs=(
            Job(seconds=4.0, ttft_s=1.0, decode_ms=20.0, tokens_read=512, tokens_cached=0),
            Job(seconds=6.0, ttft_s=2.0, decode_ms=40.0, tokens_read=512, tokens_cached=0),
        ),
    )
    assert (one.users, one.mean_s, one.worst_s, one.ttft_s, one.worst_ttft_s, one.decode_ms) == (2, 5, 6, 1.5, 2, 30)
    assert one.tokens_per_s == pytest.approx(200 / 5)
    assert one.cost_s == 5
    limited = replace(one, workload=replace(one.workload, ttft_limit_s=1.5))
    assert limited.cost_s == pytest.approx(5 + 9 * 0.5 / 2)


def test_the_shortest_mean_job_wins_and_the_words_carry_the_others() -> None:
    chosen = choose([seen(5, 8.0, 8.0), seen(1, 4.0, 8.0)])
    assert chosen.slots == 1
    assert "2 users' chat jobs take 6.0 s in the mean, 8.0 s at worst" in chosen.why
    assert "with 5 8.0 s in the mean" in chosen.why


def test_what_noise_cannot_tell_goes_to_fewer_slots() -> None:
    chosen = choose([seen(5, 8.0, 8.0), seen(2, 8.3, 8.3)])
    assert chosen.slots == 2
    assert "5 slots are no faster than noise (8.0 s) and need no less memory" in chosen.why
    assert choose([seen(5, 8.0, 8.0), seen(2, 8.3, 8.3)], noise=0.01).slots == 5


def test_a_limit_on_the_first_token_outweighs_a_shorter_mean() -> None:
    limited = replace(CHAT, ttft_limit_s=2.0)
    together = seen(3, 8.0, 8.0, ttft_s=1.0, workload=limited)
    queued = seen(1, 4.0, 8.0, ttft_s=5.0, workload=limited)
    assert choose([replace(one, workload=CHAT) for one in (together, queued)]).slots == 1
    assert choose([together, queued]).slots == 3
    assert "a first token after 4.5 s, the slowest later than 2 s" in choose([queued]).why


def test_none_measured_is_an_error_and_one_is_taken() -> None:
    with pytest.raises(ValueError, match="no slot count was measured"):
        choose([])
    with pytest.raises(ValueError, match=r"different jobs: 4 slots with 1 of chat, 2 slots with 1 of coding agent"):
        choose([seen(4, 3.0), seen(2, 3.0, workload=CODING_AGENT)])
    with pytest.raises(ValueError, match="different jobs"):
        choose([seen(4, 3.0), seen(2, 3.0, 3.0)])
    assert choose([seen(4, 3.0)]).why.startswith("the only count measured: 1 users' chat jobs take 3.0 s")


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 100)), min_size=1, max_size=5), st.floats(0, 0.5))
def test_what_is_chosen_is_never_worse_than_noise(figures: list[tuple[int, float]], noise: float) -> None:
    measured = [seen(slots, seconds) for slots, seconds in figures]
    chosen = choose(measured, noise=noise)
    least = min(seconds for _, seconds in figures)
    assert min(s for slots, s in figures if slots == chosen.slots) <= least * (1 + noise) * (1 + 1e-9)
    assert chosen.slots == min(slots for slots, s in figures if s <= least * (1 + noise))


def test_a_plan_with_the_chosen_slots_says_why() -> None:
    found = planned(users="4")
    chosen = choose([seen(5, 8.0), seen(2, 4.0)])
    assert chosen.slots == 2
    changed = with_slots(found, chosen)
    assert changed.parallel == 2
    words = next(c for c in changed.choices if c.name == "parallel")
    assert (words.value, words.source, words.reason) == ("2", "measured", chosen.why)
    assert [c for c in changed.choices if c.name != "parallel"] == [c for c in found.choices if c.name != "parallel"]


REPLY = {"timings": {"prompt_n": 500, "cache_n": 12, "predicted_n": 256, "prompt_ms": 900.0, "predicted_ms": 2550.0}}


def test_a_job_is_read_from_the_engines_timings() -> None:
    job = job_of(parse_completion(REPLY), CHAT, 4.0)
    assert (job.ttft_s, job.decode_ms) == pytest.approx((1.45, 10.0))
    assert (job.seconds, job.tokens_read, job.tokens_cached) == (4.0, 500, 12)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt_n": 499}, "read 499"),
        ({"predicted_n": 255}, "made 255 of 256"),
        ({"prompt_n": 452, "cache_n": 60}, "at most 40 cached"),
        ({"predicted_ms": 0.0}, "gave no times: 0 s"),
        ({"predicted_ms": 4100.0}, "gave no times: 4.1 s for 256 tokens of a job of 4 s"),
    ],
)
def test_other_work_than_asked_is_no_figure(changed: dict[str, float], words: str) -> None:
    with pytest.raises(EngineNotReadyError, match=words):
        job_of(parse_completion({"timings": REPLY["timings"] | changed}), CHAT, 4.0)


def test_a_job_may_have_cached_what_the_turn_before_left_and_may_have_lost_it() -> None:
    kept = {"prompt_n": 2048, "cache_n": 14336, "predicted_n": 512, "predicted_ms": 1000.0}
    assert job_of(parse_completion({"timings": kept}), CODING_AGENT, 4.0).tokens_cached == 14336
    lost = kept | {"prompt_n": 16384, "cache_n": 0}
    assert job_of(parse_completion({"timings": lost}), CODING_AGENT, 40.0).tokens_cached == 0
