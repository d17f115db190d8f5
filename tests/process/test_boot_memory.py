"""Starts whose engine runs out of memory as it loads: they step down to what it says was missing, or end with it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import ROOT, Home, Serving
from tests.process.stages.nvml import PutMachine, laptop_home

BACKEND_OPS = ROOT / "tests/fakes/fake_backend_ops.py"
MACHINE = "laptop-5060"
WHOLE = "--gpu-layers 5 "  # its four layers and the output
REFUSED = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating {mib:.2f} MiB on device 0: cudaMalloc failed: out of memory"
)
USING = (
    "0.00.060.001 I llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 5060 Laptop GPU) "
    "(0000:01:00.0) - {mib} MiB free"
)


@pytest.fixture
def home(tmp_path: Path, machine_environment: PutMachine) -> Home:
    return laptop_home(tmp_path / "home", machine_environment(MACHINE))


@pytest.mark.parametrize("failing", [0, 3])
def test_doctor_runs_the_kernels_of_the_gpu(home: Home, failing: int) -> None:
    home.set_variants("x64")
    home.set_kernel_check()
    asked = home.folder / "asked"
    words = shlex.join([sys.executable, str(BACKEND_OPS), "--failing", str(failing), "--asked", str(asked)])
    path = home.folder / "engine/test-backend-ops"
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
    done = home.command("doctor", "--kernels", "--json")
    (check,) = [each for each in json.loads(done.stdout)["checks"] if each["name"] == "kernels CUDA0"]
    if failing:
        assert (check["status"], check["exit_code"]) == ("fail", 20)
        assert check["value"] == "3 of 40 cases fail: MUL_MAT(type_a=f32,type_b=f32,n=0)"
    else:
        assert (check["status"], check["value"]) == ("pass", "40 cases as the CPU's")
    device, ops, pattern, variant = asked.read_text().split()
    assert (device, ops, variant) == ("CUDA0", "MUL_MAT,MUL_MAT_ID,FLASH_ATTN_EXT", "x64")
    assert pattern.startswith("type_a=(")
    path.unlink()
    checks = json.loads(home.command("doctor", "--kernels", "--json").stdout)["checks"]
    assert [each["status"] for each in checks if each["name"] == "kernels GPU"] == ["warn"]


def refuse(home: Home, mib: float, *, where: str = "", free_mib: int | None = None) -> None:
    """The GPU has no room for starts with these words."""
    said = () if free_mib is None else ("--log-line", USING.format(mib=free_mib))
    home.set_engine(*said, "--error-line", REFUSED.format(mib=mib), "--die-before-ready", "1", where=where)


def steps(serving: Serving) -> list[dict[str, Any]]:
    return [event for event in serving.events if event["event"] == "stepped_down"]


def on_gpu_mib(plan: dict[str, Any]) -> float:
    found: float = sum(share["memory"]["total"] for share in plan["placement"]["shares"])
    return found


def test_a_smaller_plan_is_served_where_the_gpu_had_less(home: Home) -> None:
    before = home.plan()
    refuse(home, 6, where="--ctx-size 8192 --cache-type-k f16 ")
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        plan, (said,) = serving.document("plan"), steps(serving)
        assert 0 < on_gpu_mib(plan) <= on_gpu_mib(before) - 6
        assert said["level"] == "warning"
        assert "6 MiB too few on CUDA0 (NVIDIA GeForce RTX 5060 Laptop GPU); serving " in said["message"]
        assert (said["context_before"], said["context"]) == (before["context"], plan["context"])
        assert said["missing_mib"] == 6
        assert serving.document("hardware")["gpus"]["gpus"][0]["vram_free_mib"] == 8151 - 350  # as it was seen
        assert len(serving.engine_pids()) == 1
        names = serving.names()
        assert names.count("ready") == 1
        assert names.index("engine_start") < names.index("stepped_down") < names.index("ready")
        serving.terminate()
    assert len(home.started) == 2


def test_the_window_gives_way_where_the_layers_were_asked_for(home: Home) -> None:
    refuse(home, 6, where="--ctx-size 8192 ")
    with home.serving(tune="off", kv_type="f16", gpu_layers="99") as serving:
        serving.wait_ready()
        plan, (said,) = serving.document("plan"), steps(serving)
        assert said["context"] == plan["context"] < said["context_before"] == 8192
        assert f"--ctx-size {plan['context']} --cache-type-k f16 " in home.started[-1]
        assert "--gpu-layers 5 " in home.started[-1]


def test_what_was_free_when_the_engine_began_counts_where_its_log_tells_it(home: Home) -> None:
    """The log says less than the GPU's reserve, so the next plan uses no GPU."""
    refuse(home, 1, where="--device CUDA0 ", free_mib=20)
    with home.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert serving.document("plan")["placement"]["shares"] == []
        assert "placement CPU instead of " in steps(serving)[0]["message"]
    assert len(home.started) == 2


def test_what_was_asked_for_and_cannot_be_smaller_ends_with_the_engine_s_own_error(home: Home) -> None:
    refuse(home, 6)
    with home.serving(tune="off", ctx_size="8192", kv_type="f16", gpu_layers="99") as serving:
        assert serving.wait_exit() == 41
        assert steps(serving) == []
        text = serving.text
    assert len(home.started) == 1
    assert any(line.startswith("  | ") and REFUSED.format(mib=6) in line for line in text.splitlines())
    asked = "ctx_size '8192' (variable APPLIANCE_CTX_SIZE), kv_type 'f16' (variable APPLIANCE_KV_TYPE), gpu_layers '99'"
    assert f"no smaller plan keeps what was asked for: {asked}" in text.split("hint: ")[-1]


def test_after_three_steps_it_is_given_up(home: Home) -> None:
    refuse(home, 2)
    with home.serving(tune="off") as serving:
        assert serving.wait_exit() == 41
        assert len(steps(serving)) == 3
    assert len(home.started) == len(set(home.started)) == 4


def test_a_shortage_without_a_size_steps_nowhere(home: Home) -> None:
    home.set_engine("--error-line", "CUDA error: out of memory", "--die-before-ready", "1")
    with home.serving(tune="off") as serving:
        assert serving.wait_exit() == 41
        assert steps(serving) == []
    assert len(home.started) == 1


def test_a_profile_whose_plan_does_not_load_stays_what_it_is(home: Home) -> None:
    done = home.command("tune", kv_type="f16", ctx_size="8192")
    assert done.returncode == 0, done.stderr
    kept = {path.name: path.read_bytes() for path in home.profiles.iterdir() if path.is_file()}
    measured = len(home.started)
    refuse(home, 6, where="--device CUDA0 ", free_mib=20)
    with home.serving(tune="off", kv_type="f16", ctx_size="8192") as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert len(steps(serving)) == 1
        assert serving.document("plan")["placement"]["shares"] == []
        status = serving.document("status")
        standing = status["standing"]
        assert (status["speed"], status["from_profile"]) == (None, False), "the smaller plan was not measured"
        assert status["predicted_speed"]
        assert serving.document("profile")["speed"] is None
        serving.terminate()
    assert len(home.started) == measured + 2
    assert {path.name: path.read_bytes() for path in home.profiles.iterdir() if path.is_file()} == kept
    assert standing
    home.set_engine()
    with home.serving(tune="off", kv_type="f16", ctx_size="8192") as serving:
        serving.wait_ready()
        assert on_gpu_mib(serving.document("plan")) > 0
        assert not {"stepped_down", "tune_start", "profile_stale"} & set(serving.names())
