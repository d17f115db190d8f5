"""The reserve of a card follows what the engine was seen to hold while it served: two starts on a described GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts, parse_engine_facts, parse_image_facts
from tests.golden.vllm_plans import SMS, engine_facts
from tests.process.stages.boot import Serving, eventually
from tests.process.stages.nvml import put_machine
from tests.process.stages.vllm_home import VllmHome

MACHINE = "2x4090"
CARD = "GPU-00000000-0000-0000-0000-000000000000"
# Four requests at once: with more of them the sampler may need more than the forward pass, which is another rule.
SETTINGS = {"devices": CARD, "speculation": "off", "parallel": "4"}
OF_THE_MODEL = ("--block-size", "16", "--fake-block-bytes", "368640")  # SmolLM2-135M in bfloat16
KV_MIB = 1024  # that the fake finds left on a first start
READY_MIB = 1100  # beside it
REQUESTS = 20
RUNS_OUT = "torch.OutOfMemoryError: CUDA out of memory"
LONG = "word " * 2010


class GpuHome(VllmHome):
    """A home with two cards, one of them in use. `engine_gone` gives its memory back, as the driver does."""

    program = "tests.fakes.quick_looks"
    engine_gone: Callable[[], None]

    def grows(self, mib: int) -> None:
        machine = self.variables["FAKE_NVML_MACHINE"]
        held = ("--fake-gpu", machine, "--fake-gpu-mib", str(READY_MIB), "--fake-gpu-growth-mib", str(mib))
        self.set_engine(*OF_THE_MODEL, *held)

    def plan_with(self, **settings: str) -> dict[str, Any]:
        return self.plan(**SETTINGS, **settings)


@pytest.fixture
def home(nvml_library: Path, tmp_path: Path) -> Iterator[GpuHome]:
    driver = tmp_path / "driver"
    driver.mkdir()
    shutil.copy(nvml_library, driver)
    (driver / "libcuda.so.1").touch()
    home = GpuHome.make(tmp_path / "home")
    assert isinstance(home, GpuHome)
    image = parse_image_facts((home.folder / "facts/image_facts.json").read_text())
    image = replace(image, cell="vllm-cu130", cuda="13.0", sm=SMS, driver_floor_sass="580")
    (home.folder / "facts/image_facts.json").write_text(dump_facts(image))
    facts = parse_engine_facts((home.folder / "facts/engine_facts.json").read_text())
    facts = replace(facts, flags=engine_facts("0.33").flags)
    (home.folder / "facts/engine_facts.json").write_text(dump_facts(facts))

    def engine_gone() -> None:
        described = put_machine(driver / nvml_library.name, tmp_path, MACHINE)
        home.variables = {name: described[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML_MACHINE")}

    home.engine_gone = engine_gone
    engine_gone()
    yield home
    home.free_segments()


def reserve(plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(choice for choice in plan["choices"] if choice["name"] == "reserve")
    return found


def decided(plan: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the card alone decides of a plan. The host's memory is left out: it goes up and down by itself."""
    return plan["context"], plan["launch"], plan["placement"], reserve(plan)


def serve(home: GpuHome, *, requests: int, **settings: str) -> dict[str, Any]:
    """Answer this many requests, the last with a prompt that fills a step. Returns the memory figures that were
    kept."""
    with home.serving(**SETTINGS, **settings) as serving:
        serving.wait_ready()
        serving.event("memory_seen")
        for words in ("hi",) * (requests - 1) + (LONG,):
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
            assert serving.ask("POST", "/v1/chat/completions", body, key=home.key)[0] == 200
        eventually(lambda: is_known(serving, requests), what=lambda: serving.text)
        found: dict[str, Any] = serving.document("status")["gpu_memory"]
        serving.terminate()
    home.engine_gone()
    return found


def is_known(serving: Serving, requests: int) -> bool:
    """True if the last record has the card's peak, and counts as whole once there were enough requests."""
    (last,) = [event for event in serving.events if event["event"] == "memory_seen"][-1:]
    (card,) = serving.document("status")["gpu_memory"]["cards"]
    is_told = f"{card['peak_mib']:,} MiB of" in last["message"] and card["peak_mib"] > card["ready_mib"]
    return is_told and last["is_whole"] == (requests >= REQUESTS)


@pytest.mark.parametrize("growth", [100, 900])
def test_a_later_start_has_the_reserve_that_was_seen(growth: int, home: GpuHome) -> None:
    home.grows(growth)
    first = home.plan_with()
    memory = serve(home, requests=REQUESTS)
    (card,) = memory["cards"]
    assert (card["device"], card["ready_mib"]) == (CARD, KV_MIB + READY_MIB)
    assert card["peak_mib"] == KV_MIB + READY_MIB + growth
    assert "--kv-cache-memory-bytes" not in home.started[-1]

    (share,) = first["placement"]["shares"]
    held_mib = READY_MIB + growth  # beside the cache
    estimate_mib = share["gpu"]["context_mib"] + share["memory"]["total"] - share["memory"]["kv"]
    free_mib = share["gpu"]["free_mib"] + share["gpu"]["held_back_mib"]
    second = home.plan_with()
    said = reserve(second)
    seen_mib = max(0.0, held_mib - estimate_mib)
    assumed_mib = float(reserve(first)["value"].split()[0].replace(",", "")) - 150
    assert said["reason"] == f"150 vLLM's own margin + {seen_mib:,.0f} seen in service, assumed were {assumed_mib:,.0f}"
    assert said["source"] == "measured"
    kv_mib = second["placement"]["shares"][0]["memory"]["kv"]
    assert kv_mib == pytest.approx(free_mib - held_mib - 150, abs=1)
    with home.serving(**SETTINGS) as serving:
        serving.wait_ready()
        assert f"--kv-cache-memory-bytes {second['launch']['kv_bytes']} " in home.started[-1]
        assert reserve(serving.document("plan")) == said
        serving.terminate()
    home.engine_gone()
    assert "seen in service" in home.command("plan", "--explain", beside=None, **SETTINGS).stdout


def test_what_was_held_before_the_largest_work_decides_nothing(home: GpuHome) -> None:
    home.grows(3000)
    before = home.plan_with()
    with home.serving(**SETTINGS) as serving:
        serving.wait_ready()
        eventually(lambda: serving.document("status")["gpu_memory"])
        assert serving.chat()[0] == 200
        serving.event("memory_seen")
        serving.terminate()
    home.engine_gone()
    assert decided(home.plan_with()) == decided(before)
    assert serve(home, requests=3)["is_whole"] is False
    assert decided(home.plan_with()) == decided(before)


@pytest.mark.parametrize("when", ["load", "first", "second"])
def test_an_engine_that_runs_out_of_memory_is_no_measure_for_the_next(when: str, home: GpuHome) -> None:
    home.grows(100)
    before = home.plan_with()
    serve(home, requests=REQUESTS)
    assert "seen in service" in reserve(home.plan_with())["reason"]
    home.set_engine(*OF_THE_MODEL, "--fake-worker-error", when, "--fake-error", RUNS_OUT)
    with home.serving(**SETTINGS) as serving:
        if when != "second":
            assert serving.wait_exit() == 41
        else:
            serving.wait_ready()
            serving.chat()
            serving.event("engine_died")
            serving.terminate()
    assert decided(home.plan_with()) == decided(before)


def test_a_peak_that_no_card_can_hold_is_said_and_forgotten_by_its_id(home: GpuHome) -> None:
    home.grows(100)
    before = home.plan_with()
    serve(home, requests=REQUESTS)
    (path,) = home.profiles.glob("*.peak")
    document = json.loads(path.read_text())
    document["peaks"][0]["cards"][0]["peak_mib"] = 10**9
    path.write_text(json.dumps(document))
    assert decided(home.plan_with()) == decided(before)
    with home.serving(**SETTINGS) as serving:
        serving.wait_ready()
        assert "is not believed, not used: 1,000,000,000 MiB of " in serving.event("profile_set_aside")["message"]
        serving.terminate()
    home.engine_gone()
    assert home.command("profiles", "forget", path.stem).returncode == 0
    assert not path.exists()


def test_a_reserve_that_was_asked_for_stays_and_is_said(home: GpuHome) -> None:
    home.grows(3000)
    serve(home, requests=REQUESTS, reserve_mib="700")
    said = reserve(home.plan_with(reserve_mib="700"))
    assert said["value"] == "700 MiB"
    assert said["reason"].startswith("700 asked for; ")
    assert said["reason"].endswith("beyond the estimate were seen in service and are not used")
    assert "--kv-cache-memory-bytes" not in home.started[-1]


def test_a_driver_that_tells_of_no_process_tells_nothing(home: GpuHome) -> None:
    home.set_engine(*OF_THE_MODEL)
    before = home.plan_with()
    with home.serving(**SETTINGS) as serving:
        serving.wait_ready()
        for _ in range(3):
            assert serving.chat()[0] == 200
        assert serving.document("status")["gpu_memory"] is None
        serving.terminate()
    assert "memory_seen" not in serving.names()
    assert decided(home.plan_with()) == decided(before)
    assert not list(home.profiles.glob("*.peak"))


def test_a_broken_file_is_said_and_costs_nothing(home: GpuHome) -> None:
    home.grows(100)
    serve(home, requests=REQUESTS)
    (path,) = home.profiles.glob("*.peak")
    document = json.loads(path.read_text())
    document["peaks"][0]["cards"][0]["peak_mib"] = -1
    path.write_text(json.dumps(document))
    assert "seen in service" not in reserve(home.plan_with())["reason"]
    serve(home, requests=REQUESTS)
    assert path.with_suffix(".peak-corrupt").exists()
    assert "seen in service" in reserve(home.plan_with())["reason"]
