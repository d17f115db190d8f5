"""Which candidates share a llama-bench process, and how its figures count beside the server's."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engines.llama_bench import Steps
from appliance.plan import Costs
from appliance.tune.companions import CELLS_MAX, Together, companions
from appliance.tune.curve import Point
from appliance.tune.guided import Ask, Effort, OutOfMemory, Search, State, Trial
from appliance.tune.terms import Candidate, Need
from appliance.tune.workload import CHAT, only

THREADS, UBATCHES = (1, 2, 4, 8, 16), (128, 256, 512, 1024)
STEPS = Steps(stretch=512)


def candidate(
    threads: int, ubatch: int, *, kv_type: str = "f16", window: int = 8192, cpu_ms: float = 30.0, need_mib: float = 10.0
) -> Candidate:
    """A little off its best at every other number of threads and every other ubatch."""
    work = Costs(
        gpu_ms=5.0,
        cpu_ms=cpu_ms * (1 + abs(math.log2(threads / 4)) / 20),
        gpu_prefill_ms=0.5 * (1 + abs(math.log2(ubatch / 512)) / 20),
    )
    knobs = (("cpu_layers", 4), ("kv_type", kv_type), ("threads", threads), ("ubatch", ubatch))
    needs = (Need(device="gpu", need_mib=need_mib, room_mib=1000.0),)
    key = f"{kv_type}/{window}/{threads}/{ubatch}"
    return Candidate(key=key, knobs=knobs, window=window, work=work, needs=needs)


SPACE = tuple(
    candidate(t, u, kv_type=k, window=w) for k, w, t, u in product(("f16", "q8_0"), (4096, 8192), THREADS, UBATCHES)
)


def searched(space: tuple[Candidate, ...] = SPACE, *, load_s: float = 60.0, noise: float = 0.05) -> Search:
    return Search(space, only(CHAT), Effort(depths=(32, 512), load_s=load_s, noise=noise))


def asked(search: Search, trials: list[Trial], left_s: float = math.inf) -> Ask:
    found = search.ask(trials, left_s=left_s)
    assert isinstance(found, Ask)
    return found


def together(search: Search, trials: list[Trial], left_s: float = math.inf) -> Together | None:
    return companions(search, trials, asked(search, trials), kv_type="f16", steps=STEPS, left_s=left_s)


def measured(key: str, *, ms: float = 35.0, via: str = "server", is_long: bool = False) -> Trial:
    points = (
        Point(depth=0, decode_ms=ms, prefill_ms=0.0, prefill_tokens=0),
        Point(depth=512, decode_ms=ms, prefill_ms=0.5, prefill_tokens=512),
    )
    return Trial(key=key, points=points, via=via, load_s=60.0, is_long=is_long)


def test_beside_a_long_load_the_neighbours_come_along() -> None:
    search = searched()
    found = together(search, [])
    assert found is not None
    assert 4 <= len(found.keys) <= CELLS_MAX
    assert found.seconds < 0.5 * found.alone_s
    assert found.keys[0][1] == asked(search, []).candidate.key
    assert found.grid.kv_type == "f16"
    assert found.steps.decode_tokens == search.tokens(is_long=True)  # beside such a load the first look is a long one


def test_what_is_hopeless_does_not_come_along() -> None:
    space = tuple(candidate(t, 512, cpu_ms=30.0 if t in (2, 4) else 900.0) for t in THREADS)
    found = together(searched(space), [])
    assert found is not None
    assert set(found.grid.threads) == {2, 4}


def test_where_a_load_is_shorter_than_what_llama_bench_reads_twice_the_server_does_it() -> None:
    assert together(searched(load_s=0.1), []) is None


def test_what_is_asked_for_again_is_to_be_told_from_another_on_the_server() -> None:
    search = searched()
    ask = asked(search, [])
    trials = [measured(ask.candidate.key)]
    assert companions(search, trials, ask, kv_type="f16", steps=STEPS, left_s=math.inf) is None


def test_with_the_engine_up_or_without_those_knobs_there_is_nothing_to_share() -> None:
    search = searched()
    ask = asked(search, [])
    up = Ask(candidate=ask.candidate, is_long=False, needs_load=False, seconds=1.0, why="")
    assert companions(search, [], up, kv_type="f16", steps=STEPS, left_s=math.inf) is None
    bare = (Candidate(key="a", knobs=(("cpu_layers", 1),), window=1, work=Costs(cpu_ms=1.0, gpu_prefill_ms=1.0)),)
    assert together(searched(bare), []) is None


def test_of_threads_that_no_prediction_tells_apart_one_stands_for_all() -> None:
    space = tuple(candidate(t, u, cpu_ms=0.0) for t, u in product(THREADS, UBATCHES))
    found = together(searched(space), [])
    assert found is not None
    assert len(found.grid.threads) == 1
    assert len(found.grid.ubatches) > 1


def test_what_was_measured_failed_or_cannot_fit_is_not_run_again() -> None:
    space = tuple(candidate(t, 512, need_mib=5000.0 if t == 8 else 10.0) for t in THREADS)
    search = searched(space)
    trials = [Trial(key="f16/8192/2/512"), measured("f16/8192/16/512", ms=50.0)]
    found = together(search, trials)
    assert found is None or set(found.grid.threads) <= {4, 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(THREADS), st.sampled_from(UBATCHES)), min_size=1, max_size=20, unique=True),
    st.floats(0.5, 300),
    st.floats(1, 2000),
    st.floats(0, 100),
    st.lists(
        st.tuples(st.integers(0, 19), st.sampled_from(("server", "bench", "failed")), st.floats(10, 90)), max_size=4
    ),
)
def test_a_grid_is_small_whole_new_and_within_its_time(
    pairs: list[tuple[int, int]],
    load_s: float,
    left_s: float,
    cpu_ms: float,
    seen: list[tuple[int, str, float]],
) -> None:
    space = tuple(candidate(t, u, cpu_ms=cpu_ms) for t, u in pairs)
    search = searched(space, load_s=load_s)
    trials = [
        Trial(key=space[n].key) if via == "failed" else measured(space[n].key, ms=ms, via=via)
        for n, via, ms in seen
        if n < len(space)
    ]
    ask = search.ask(trials, left_s=math.inf)
    if not isinstance(ask, Ask):
        return
    found = companions(search, trials, ask, kv_type="f16", steps=STEPS, left_s=left_s)
    if found is None:
        return
    assert 2 <= len(found.keys) <= CELLS_MAX
    assert found.seconds <= min(left_s, found.alone_s)
    assert ask.candidate.key in {key for _, key in found.keys}
    assert [cell for cell, _ in found.keys] == list(found.grid.cells)
    tried = {trial.key for trial in trials}
    for cell, key in found.keys:
        knobs = search.candidate(key).by_knob
        assert (knobs["threads"], knobs["ubatch"]) == (cell.threads, cell.ubatch)
        assert search.candidate(key).load == ask.candidate.load
        assert key not in tried
    assert len({search.twins(key) for _, key in found.keys}) == len(found.keys)


def state(search: Search, *trials: Trial) -> State:
    return State(search, trials)


def test_what_llama_bench_leaves_out_is_learned_where_both_were_measured_and_taken_out() -> None:
    """llama-bench is 8 % faster throughout; a third candidate was measured there alone, and must not look better."""
    search = searched(noise=0.01)
    both = ("f16/8192/4/512", "f16/8192/2/512", "f16/8192/8/512")
    trials = [measured(key, via=via, ms=ms) for key in both for via, ms in (("server", 35.0), ("bench", 35.0 * 0.92))]
    alone = measured("f16/8192/1/512", via="bench", ms=35.0 * 0.92)
    seen = state(search, *trials, alone)
    assert seen.fit.correction("bench:decode") == pytest.approx(0.92, abs=0.02)
    times = {estimate.candidate.key: estimate.ms for estimate in seen.measured}
    assert times["f16/8192/1/512"] == pytest.approx(times["f16/8192/4/512"], rel=0.03)


def test_without_any_on_the_server_llama_benchs_figures_stand_as_they_are() -> None:
    search = searched()
    fast, slow = (measured(f"f16/8192/{t}/512", via="bench", ms=ms) for t, ms in ((4, 30.0), (8, 40.0)))
    ranked = search.rank([fast, slow])
    assert [estimate.candidate.key for estimate in ranked] == [fast.key, slow.key]
    assert ranked[0].is_measured


def test_a_candidate_that_was_measured_on_the_server_is_surer() -> None:
    search, key = searched(), "f16/8192/4/512"
    on_bench, on_server = (state(search, measured(key, via=via)).measured[0].spread for via in ("bench", "server"))
    assert on_server < on_bench
    often, often_on_server = (
        state(search, *[measured(key, via=via)] * 20).measured[0].spread for via in ("bench", "server")
    )
    assert often_on_server < 0.7 * often  # what is not known of the way to the server, more of the same does not tell


def test_a_small_window_that_fits_says_nothing_of_the_plans() -> None:
    search = searched(tuple(candidate(t, 512, need_mib=1000.0) for t in THREADS))
    key = "f16/8192/4/512"
    assert state(search, measured(key)).chance(search.candidate(key)) == 1.0
    assert state(search, measured(key, via="bench")).chance(search.candidate(key)) == pytest.approx(0.5)


def test_one_that_the_server_had_no_memory_for_is_not_ranked_whatever_llama_bench_said() -> None:
    search = searched()
    first, second = "f16/8192/4/512", "f16/8192/2/512"
    trials = [
        measured(first, via="bench", ms=20.0),
        measured(second, via="bench", ms=40.0),
        Trial(key=first, lacking=OutOfMemory(device="gpu", missing_mib=1.0)),
    ]
    assert [estimate.candidate.key for estimate in search.rank(trials)] == [second]


def test_its_process_has_ended_so_the_next_needs_a_load() -> None:
    search = searched()
    key = "f16/8192/4/512"
    assert asked(search, [measured(key, via="bench")]).needs_load
