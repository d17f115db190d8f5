"""Checks of a profile in idle time on vLLM, through the same doors: speculative decoding, needles, and a soak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.plan import Plan
from appliance.probe import Hardware
from appliance.serve.model import courtesy
from tests.process.stages.front import front_of
from tests.process.stages.supervisor import eventually
from tests.process.stages.vllm_home import VllmHome

# Few plans: a search of all would take minutes.
FEW = {"kv_type": "bf16", "engine_arg": "--enforce-eager", "ubatch": "2048"}
QUICK: dict[str, str] = {"tune": "first", "idle_s": "1", "check_abilities": "off", **FEW}
FASTER = ("--fake-decode-ms", "2")
SPECULATES = "--speculative-config"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    """A home whose profile has speculative decoding."""
    home = VllmHome.make(tmp_path_factory.mktemp("vllm-checks") / "home")
    home.program = "tests.fakes.never_busy"
    home.always = ("--fake-interval", "0")
    home.set_engine(*FASTER, where=SPECULATES)
    done = home.command("tune", beside=None, budget_s="20", **FEW)
    assert done.returncode == 0, done.stderr
    home.calm()
    yield home
    home.free_segments()


@pytest.fixture
def home(tuned: VllmHome, tmp_path: Path) -> Iterator[VllmHome]:
    home = tuned.copy(tmp_path / "home")
    home.program = tuned.program
    yield home
    home.free_segments()


def test_speculation_that_changes_answers_is_refused(home: VllmHome) -> None:
    home.set_engine(*FASTER, "--fake-changes", "0.02", where=SPECULATES)
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        assert SPECULATES in home.started[-1]
        told = serving.event("speculation_compared")
        assert (told["level"], told["verdict"]) == ("warning", "refused")
        serving.event("idle_changed")
        assert SPECULATES not in home.started[-1]
        check = serving.document("status")["checks"]["speculation"]
        assert check["differing"] > 6
        assert (check["windows"], check["differing_again"], check["documents"]) == (132, 0, 20)
        assert check["drafted"] > check["accepted"] > 0


def test_needles_and_soak(home: VllmHome) -> None:
    home.set_engine("--fake-recalls", "3000")
    with home.serving(**QUICK, speculation="off", soak_s="2") as serving:
        serving.wait_ready()
        told = serving.event("soak")
        assert (told["failed"], told["answers"] > 3) == (0, True)
        checks = serving.document("status")["checks"]
        assert [(row["context"], row["verdict"]) for row in checks["needles"]] == [(8192, "failed")] * 3
        assert checks["soak"]["answers"] == told["answers"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    """A home whose profile has a KV cache of fp8, which decodes twice as fast."""
    home = VllmHome.make(tmp_path_factory.mktemp("vllm-fp8") / "home")
    home.program = "tests.fakes.never_busy"
    home.always = ("--fake-interval", "0")
    home.set_engine("--fake-decode-ms", "5", where=FP8)
    done = home.command("tune", beside=None, budget_s="20", speculation="off", **ANY_CACHE)
    assert done.returncode == 0, done.stderr
    home.calm()
    yield home
    home.free_segments()


FP8 = "--kv-cache-dtype fp8"
ANY_CACHE = {"engine_arg": "--enforce-eager", "ubatch": "2048"}
HAS_FP8 = not {"avx512f", "amx_tile"}.isdisjoint(Path("/proc/cpuinfo").read_text().split())


@pytest.mark.skipif(not HAS_FP8, reason="vLLM reads an fp8 cache on a CPU with AVX-512 or AMX only")
@pytest.mark.parametrize(("likely", "verdict"), [("0.9", "harmless"), ("0.6", "refused")])
def test_a_cheaper_cache_stays_only_if_answers_stay(
    quantized: VllmHome, tmp_path: Path, likely: str, verdict: str
) -> None:
    home = quantized.copy(tmp_path / "home")
    home.program = quantized.program
    home.set_engine("--fake-decode-ms", "5", "--fake-likely", likely, where=FP8)
    settings = {**ANY_CACHE, "tune": "first", "idle_s": "1", "check_abilities": "off", "speculation": "off"}
    with home.serving(**settings) as serving:
        serving.wait_ready()
        assert FP8 in home.started[0]
        told = serving.event("cache_compared")
        assert told["verdict"] == verdict
        assert [FP8 in line for line in home.started[:3]] == [True, False, True], "what serves, an exact one, and fp8"
        (check,) = serving.document("status")["checks"]["caches"]
        assert (check["verdict"], check["positions"], check["mean_nats"] > 0.1) == (verdict, 132, verdict == "refused")
        if verdict == "refused":
            serving.event("idle_changed")
            assert FP8 not in home.started[-1]
        else:
            serving.event("profile_probed")
            assert len(home.started) == 3
    count = len(home.started)
    with home.serving(**settings) as serving:  # from the profile, and not compared again
        serving.wait_ready()
        serving.event("profile_probed")
        assert (FP8 in home.started[-1], len(home.started)) == (verdict == "harmless", count + 1)
    home.free_segments()


@pytest.mark.skipif(not HAS_FP8, reason="vLLM reads an fp8 cache on a CPU with AVX-512 or AMX only")
async def test_an_exact_cache_that_does_not_fit_beside_the_engine_is_loaded_in_its_place(
    quantized: VllmHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second engine with the cheaper cache would fit."""
    monkeypatch.setattr(courtesy, "LOOKS", 0)  # other tests work beside this one
    home = quantized.copy(tmp_path / "home")
    home.set_engine("--fake-decode-ms", "5", "--fake-likely", "0.9", where=FP8)
    settings = {**ANY_CACHE, "tune": "first", "idle_s": "3", "check_abilities": "off", "speculation": "off"}
    async with front_of(home, stall_timeout_s=60.0, patience_s=60.0, **settings) as front:
        served = front.served
        plan = served.host.plan
        assert plan is not None
        exact = served.space_of_profile.exact(plan)
        assert exact is not None

        def with_free(mib: int) -> Hardware:
            memory = replace(served.hardware.memory, limit_mib=None, available_mib=mib)
            return replace(served.hardware, memory=memory)

        def lacks(plan: Plan, mib: int) -> bool:
            return isinstance(served.start.on(with_free(mib)).space().now(plan), str)

        between = bisect_left(range(served.hardware.memory.total_mib), True, key=lambda mib: not lacks(plan, mib))
        assert lacks(exact, between)
        served.beside = lambda _: with_free(between)
        await eventually(lambda: len(home.started) == 3, timeout_s=180)
        await eventually(lambda: served.host.is_ready and len(home.started) == 4, timeout_s=180)
        assert ["m.sock" in line for line in home.started] == [False, True, True, False]
        assert [FP8 in line for line in home.started] == [True, False, True, True]
