from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.plan import Costs
from appliance.tune.curve import Curve, Point
from appliance.tune.guided import OutOfMemory, Search, Trial
from appliance.tune.judge import judge
from appliance.tune.terms import Candidate, Need
from appliance.tune.workload import CHAT, only

DEPTHS = (32, 640, 4096)
ROOM_MIB = 8000.0


def candidate(window: int, cpu_ms: float, *, need_mib: float = 4000.0, gpu_ms: float = 5.0) -> Candidate:
    work = Costs(gpu_ms=gpu_ms, cpu_ms=cpu_ms, gpu_depth_us=2.0, gpu_prefill_ms=0.1, cpu_prefill_ms=cpu_ms / 20)
    need = Need(device="CUDA0", need_mib=need_mib, room_mib=ROOM_MIB)
    return Candidate(key=f"{window} {cpu_ms}", knobs=(("ubatch", 512),), window=window, work=work, needs=(need,))


def points(ms: float) -> tuple[Point, ...]:
    return tuple(Point(depth=d, decode_ms=ms + d / 1000, prefill_ms=0.2, prefill_tokens=d - 31) for d in DEPTHS)


SMALL, MIDDLE = candidate(8192, 1.0), candidate(16384, 5.0)


def asked(new: Candidate, *trials: Trial) -> tuple[Search, list[Trial], dict[str, Curve]]:
    seen = [Trial(key=SMALL.key, points=points(9.0)), Trial(key=MIDDLE.key, points=points(14.0)), *trials]
    curves = {trial.key: Curve(points=trial.points) for trial in seen if trial.points}
    return Search([SMALL, MIDDLE, new], only(CHAT)), seen, curves


def test_one_that_no_prediction_can_tell_from_a_measured_one_has_its_figures() -> None:
    twin = candidate(32768, MIDDLE.work.cpu_ms)
    found = judge(*asked(twin), 32768, "context")
    assert found is not None
    assert (found.key, found.mode, found.by) == (twin.key, "context", MIDDLE.key)
    assert (found.points, found.spread) == (points(14.0), 1.0)


def test_it_is_judged_by_the_measured_one_that_is_most_like_it() -> None:
    found = {ms: judge(*asked(candidate(32768, ms)), 32768, "context") for ms in (1.1, 5.5)}
    assert [each.by for each in found.values() if each] == [SMALL.key, MIDDLE.key]


@given(st.floats(5.1, 200.0))
def test_what_is_predicted_slower_is_judged_slower_and_by_an_interval(cpu_ms: float) -> None:
    found = judge(*asked(candidate(32768, cpu_ms)), 32768, "balanced")
    assert found is not None
    was = dict(zip((SMALL.key, MIDDLE.key), (points(9.0), points(14.0)), strict=True))[found.by]
    assert all(new.decode_ms > old.decode_ms for new, old in zip(found.points, was, strict=True))
    assert all(new.prefill_ms > old.prefill_ms for new, old in zip(found.points, was, strict=True))
    assert found.spread > 1
    figure = Curve(points=found.points, spread=found.spread).decode(640)
    assert figure.is_extrapolated
    assert figure.low_ms < figure.ms < figure.high_ms


def test_the_less_alike_the_wider_the_interval() -> None:
    found = [judge(*asked(candidate(32768, ms)), 32768, "context") for ms in (6.0, 20.0, 80.0)]
    spreads = [each.spread for each in found if each]
    assert spreads == sorted(spreads)
    assert len(set(spreads)) == 3


@pytest.mark.parametrize("need_mib", [ROOM_MIB + 1000, ROOM_MIB])
def test_what_memory_is_not_likely_to_hold_is_not_judged(need_mib: float) -> None:
    assert judge(*asked(candidate(32768, 6.0, need_mib=need_mib)), 32768, "context") is None
    assert judge(*asked(candidate(32768, 6.0)), 65536, "context") is None


def test_what_needs_as_much_as_one_that_failed_of_memory_is_not_judged() -> None:
    new = candidate(32768, 6.0, need_mib=7000.0)
    failed = candidate(65536, 7.0, need_mib=7100.0)
    seen = Trial(key=failed.key, lacking=OutOfMemory(device="CUDA0", missing_mib=200.0))
    _, trials, curves = asked(new)
    search = Search([SMALL, MIDDLE, new, failed], only(CHAT))
    assert judge(search, [*trials, seen], curves, 32768, "context") is None
    assert judge(search, trials, curves, 32768, "context") is not None
