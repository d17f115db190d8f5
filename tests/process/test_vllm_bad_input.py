"""What a user may get wrong with a folder of safetensors, variables, a volume: each by its exit code and words."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.process.stages.boot import eventually, is_alive
from tests.process.stages.vllm import family
from tests.process.stages.vllm_home import VllmHome
from tests.shapes.folders import write_folder


@pytest.fixture
def home(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


def is_a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("{}")


def lies(**change: object) -> Callable[[Path], None]:
    def write(model: Path) -> None:
        shutil.rmtree(model)
        write_folder(model, "smollm2-135m", **change)

    return write


def lacks_a_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    with (model / "model-00001-of-00002.safetensors").open("rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shards = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    shards["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def has_half_a_tokenizer(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (is_a_file, "serves folders of safetensors"),
        (lies(num_attention_heads=0), "config.json"),
        (lies(num_hidden_layers=10**9), "config.json"),
        (lies(torch_dtype="banana"), "its dtype is none of torch's: 'banana'"),
        (lacks_a_shard, "model-00002-of-00002.safetensors"),
        (has_half_a_tokenizer, "tokenizer_config.json: it is not JSON"),
    ],
    ids=["a file", "no heads", "a billion layers", "a type", "a shard", "a tokenizer"],
)
def test_a_folder_that_is_none_is_30_before_anything_is_started(
    spoil: Callable[[Path], None], said: str, home: VllmHome
) -> None:
    model = home.data / "models/small"
    spoil(model)
    done = home.command("serve", model=str(model), port=str(free_port()))
    assert done.returncode == 30, done.stderr
    assert said in done.stderr
    assert "hint" in done.stderr
    assert home.started == []


def test_a_model_without_a_chat_template_is_served_and_what_it_refuses_is_said(home: VllmHome) -> None:
    (home.data / "models/small/tokenizer_config.json").unlink()
    with home.serving() as serving:
        said = serving.event("not_as_asked")["message"]
        assert said.startswith("chat_template is none: ")
        assert "--chat-template-file" in said
        serving.wait_ready()
        assert serving.ask("POST", "/v1/completions", {"prompt": "a"}, key=home.key)[0] == 200
        serving.terminate()
    template = home.folder / "own.jinja"
    template.write_text("{{ messages }}")
    done = home.command("plan", "--json", chat_template_file=str(template))
    assert done.returncode == 0
    assert "the model's folder has none" not in done.stdout


def test_code_of_the_folder_is_given_to_no_engine_and_run_by_nobody(home: VllmHome) -> None:
    model, proof = home.data / "models/small", home.folder / "it-ran"
    code = f"import pathlib\npathlib.Path({str(proof)!r}).touch()\n"
    for name in ("modeling_own.py", "configuration_own.py", "tokenization_own.py"):
        (model / name).write_text(code)
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    with home.serving() as serving:
        serving.wait_ready()
        serving.terminate()
    shown = home.command("plan", "--explain")
    assert "never run unless asked" in " ".join(shown.stdout.split())
    assert not proof.exists()
    assert not any("--trust-remote-code" in line for line in home.started)
    with home.serving(engine_arg="--trust-remote-code") as serving:
        serving.wait_ready()
        serving.terminate()
    assert home.started[-1].endswith("--trust-remote-code")


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_STARTUP_PLAN", "VLLM_CPU_KVCACHE_SPACE"])
def test_a_variable_that_contradicts_the_plan_is_10(name: str, home: VllmHome) -> None:
    home.variables = {name: "1"}
    done = home.command("serve", port=str(free_port()))
    assert done.returncode == 10, done.stderr
    assert name in done.stderr
    assert home.started == []


def test_variables_are_passed_on_or_named(home: VllmHome) -> None:
    home.variables = {
        "VLLM_USE_DEEP_GEMM": "0", "VLLM_CACHE_ROOT": "/elsewhere", "VLLM_API_KEY": "of-nobody",
        "NCCL_P2P_DISABLE": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:native",
    }  # fmt: skip
    program = home.folder / "engine/bin/vllm"
    seen = home.folder / "seen"
    program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\nenv >{seen}\n", 1))
    with home.serving() as serving:
        serving.wait_ready()
        said = " ".join(event["message"] for event in serving.events if event["event"] == "not_as_asked")
        assert "of-nobody" not in serving.text
        serving.terminate()
    given = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert (given["VLLM_USE_DEEP_GEMM"], given["NCCL_P2P_DISABLE"]) == ("0", "1")
    assert given["VLLM_CACHE_ROOT"].startswith(str(home.data))
    assert "VLLM_API_KEY" not in given
    assert "vllm_cache_root" in said
    assert "vllm_api_key" in said
    assert "pytorch_cuda_alloc_conf" in said
    checks = json.loads(home.command("doctor", "--json").stdout)["checks"]
    warned = " ".join(check["value"] for check in checks if check["status"] == "warn")
    for name in ("VLLM_CACHE_ROOT", "VLLM_API_KEY", "PYTORCH_CUDA_ALLOC_CONF"):
        assert f"variable {name} is not passed on: " in warned


def test_two_appliances_on_one_volume_keep_what_the_other_uses(home: VllmHome) -> None:
    """Each compiles in the folder that both share; one is killed as it starts, and the other goes on."""
    compiled = """--compilation-config '{"cudagraph_mode":"NONE"}'"""
    with home.serving(engine_arg=compiled) as first:
        first.wait_ready()
        written = list(home.data.glob("cache/*/vllm/**/vllm_compile_cache.py"))
        for path in written:  # a failed start takes files up to a second older than itself for its own
            os.utime(path, (path.stat().st_mtime - 60,) * 2)
        caches = {path: path.read_bytes() for path in written}
        assert caches
        home.set_engine("--fake-hang-at", "profile")
        with home.serving(engine_arg=compiled, ctx_size="1024") as second:
            eventually(lambda: any("1024" in line for line in home.started[1:]))
            eventually(lambda: [pid for pid in second.engine_pids() if len(family(pid)) > 2])
            (leader,) = [pid for pid in second.engine_pids() if len(family(pid)) > 2]
            tree = family(leader)
            second.process.send_signal(signal.SIGTERM)
            second.process.wait(60)
            eventually(lambda: not [pid for pid in tree if is_alive(pid)])
        home.set_engine()
        assert all(path.read_bytes() == data for path, data in caches.items())
        assert first.chat()[0] == 200
        os.kill(first.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: "engine_died" in first.names())
        first.wait_ready()
        assert first.chat()[0] == 200
        first.terminate()
