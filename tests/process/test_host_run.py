"""`appliance run` against a Docker daemon with knobs: what it makes, what it shows, and what it refuses in words."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from images.host import wheel
from tests.ports import free_port
from tests.process.stages.daemon import IMAGE, ROOT, RTX_4090, Host, on_host

SAYS = ("--log",)
CUDA = "appliance:llama-cu130-sm89"


def test_it_ends_with_the_endpoint_and_the_key() -> None:
    with on_host("--fetch-for", "0.3", "--ready-after", "0.3") as host:
        port = free_port()
        done = host.run("run", host.model(), "-d", "--port", str(port), "--ctx-size", "4096", "--mode", "speed")
        created, restarts = host.created(), host.told("update")
    assert done.code == 0, done.err
    assert f"endpoint  http://127.0.0.1:{port}/v1\n" in done.out
    assert "key       sk-fake\n" in done.out
    assert "weights are fetched: " in done.err
    assert "of 4.9 GB, 38 MB/s, 1 min 37 s left" in done.err
    assert "the model is being loaded: m.gguf" in done.err
    assert "ready after " in done.err
    environment = {"APPLIANCE_DRAIN_S=30", "APPLIANCE_MODEL=/models/tiny.gguf", "APPLIANCE_MODE=speed"}
    assert set(created["Env"]) == environment | {"APPLIANCE_CTX_SIZE=4096"}
    assert created["HostConfig"]["ReadonlyRootfs"] is True
    # Restarts are set only once it has served: a start that fails tells its first failure.
    assert "RestartPolicy" not in created["HostConfig"]
    assert restarts == [{"RestartPolicy": {"Name": "on-failure", "MaximumRetryCount": 5}}]
    [mount] = created["HostConfig"]["Mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == (host.model_path, "/models/tiny.gguf", True)


def test_the_key_is_in_no_argument_no_label_and_no_request() -> None:
    with on_host() as host:
        host.serving()
        assert "sk-fake" not in host.log.read_text()


def test_a_token_of_the_hub_is_passed_and_kept_nowhere() -> None:
    with on_host() as host:
        host.environment["HF_TOKEN"] = "hf_secret"
        port = free_port()
        line = host.run("run", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "--dry-run", "--port", str(port))
        assert line.code == 0, line.err
        assert "--env HF_TOKEN " in line.out
        assert "hf_secret" not in line.out + line.err
        done = host.run("run", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "-d", "--port", str(port))
        assert done.code == 0, done.err
        created = host.created()
    assert "HF_TOKEN=hf_secret" in created["Env"]
    assert "APPLIANCE_MODEL=Qwen/Qwen3-8B-GGUF:Q4_K_M" in created["Env"]
    assert "hf_secret" not in str(created["Labels"]) + done.out + done.err


def test_a_password_in_an_address_reaches_no_container() -> None:
    with on_host() as host:
        for words in (
            ["https://me:hf_secret@host/m.gguf"],
            [host.model(), "--set", "draft_model=http://hf_secret@h/d"],
        ):
            done = host.run("run", *words, "-d")
            assert (done.code, done.out) == (10, "")
            assert "a password in a URL ends in logs" in done.err
            assert "hf_secret" not in done.err
        assert host.asked("containers/create") == []


def test_what_else_the_word_could_mean_is_said() -> None:
    with on_host() as host:
        done = host.run("run", "tests/fakes", "--dry-run")
    assert done.code == 0, done.err
    assert "target=/models/fakes,readonly" in done.out
    assert "note: tests/fakes is read as a path; the repository of this name is hf.co/tests/fakes\n" in done.err


def test_the_hubs_cache_of_this_machine_is_read_where_it_lies() -> None:
    with on_host() as host:
        cache = host.folder / ".cache/huggingface/hub"
        cache.mkdir(parents=True)
        words = shlex.split(host.run("run", "org/repo", "--dry-run").out)
    assert f"type=bind,source={cache},target=/mnt/huggingface,readonly" in words
    assert "HF_HUB_CACHE=/mnt/huggingface" in words


def test_a_dry_run_makes_nothing() -> None:
    with on_host() as host:
        done = host.run("run", host.model(), "--dry-run", "--name", "other", "--bind", "0.0.0.0", "--port", "12345")
        assert host.asked("containers/create") == []
    words = shlex.split(done.out)
    assert words[:5] == ["docker", "run", "--detach", "--name", "appliance-other"]
    assert words[-1] == IMAGE
    assert "0.0.0.0:12345:11435" in words
    assert {"--read-only", "no-new-privileges:true", "ALL", "--pull", "never"} <= set(words)


def test_two_models_get_two_ports() -> None:
    with on_host() as host:
        done = [host.run("run", host.model(f"{name}.gguf"), "-d") for name in ("one", "two")]
    ports = [re.findall(r"endpoint  http://127\.0\.0\.1:(\d+)/v1", each.out) for each in done]
    assert len({port for [port] in ports}) == 2


def test_one_that_ended_is_replaced() -> None:
    with on_host() as host:
        host.serving()
        assert host.run("stop").out.endswith("kept: volume appliance\n")
        host.serving()
        assert [row["NAME"] for row in table(host.run("list").out)] == ["one"]


def table(text: str) -> list[dict[str, str]]:
    heads, *rows = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    return [dict(zip(heads, row, strict=True)) for row in rows]


# In the foreground.


def wait_for(program: subprocess.Popen[str], words: str) -> None:
    assert program.stderr
    for line in program.stderr:
        if words in line:
            return
    pytest.fail(f"it never said: {words}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("when", ["loading", "serving"])
def test_a_signal_stops_the_container(number: signal.Signals, code: int, when: str) -> None:
    with on_host("--ready-after", "3600" if when == "loading" else "0") as host:
        with host.begin("run", host.model(), "--name", "one", "--port", str(free_port())) as program:
            wait_for(program, "being loaded" if when == "loading" else "the model is ready")
            program.send_signal(number)
            _, err = program.communicate(timeout=90)
        assert program.returncode == code, err
        assert "stopping one" in err
        assert "no appliance on this machine" in host.run("list").out
    assert "Traceback" not in err


def test_one_that_is_stopped_from_elsewhere_ends_without_an_error() -> None:
    with on_host() as host, host.begin("run", host.model(), "--name", "one", "--port", str(free_port())) as program:
        wait_for(program, "the model is ready")
        assert host.run("stop", "one").code == 0
        _, err = program.communicate(timeout=90)
    assert program.returncode == 0, err
    assert "it was stopped" in err


# What cannot be.


def test_a_container_that_ends_gives_its_words_and_its_code_and_leaves_its_name_free() -> None:
    event = '{"time": "2026-11-22T19:56:46.1+00:00", "level": "warning", "message": "small"}'
    with on_host("--exit", "31", *SAYS, event, *SAYS, "error: the model does not fit", *SAYS, "hint: less") as host:
        done = host.run("run", host.model(), "-d", "--image", IMAGE, "--port", str(free_port()))
        assert (done.code, done.out) == (31, "")
        error = "error: the container ended with code 31: the model does not fit\n\nhint: less\n"
        assert done.err.endswith(f"  | 19:56:46 warning: small\n{error}")
        assert "no appliance" in host.run("list").out


def test_a_container_that_the_kernel_killed_is_told_as_that() -> None:
    with on_host("--exit", "137", "--oom") as host:
        done = host.run("run", host.model(), "-d", "--image", IMAGE, "--port", str(free_port()))
    assert done.code == 137
    assert "killed by the kernel, memory ran out" in done.err


def test_a_name_in_use_says_what_runs_there() -> None:
    with on_host() as host:
        port = host.serving()
        done = host.run("run", host.model(), "--name", "one", "-d")
    assert done.code == 10
    assert f"error: the name is in use: one serves {host.model_path} at http://127.0.0.1:{port}/v1" in done.err
    assert "--name OTHER" in done.err


def test_a_port_in_use_is_refused_before_anything_is_made() -> None:
    with on_host() as host, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = host.run("run", host.model(), "--port", str(port), "-d")
        assert host.asked("containers/create") == []
    assert done.code == 10
    assert f"error: the port is in use: 127.0.0.1:{port}\n" in done.err


def test_a_port_of_another_appliance_names_it() -> None:
    with on_host() as host:
        port = host.serving()
        done = host.run("run", host.model("other.gguf"), "--port", str(port), "-d")
    assert f"error: the port is in use: 127.0.0.1:{port}, by appliance-one" in done.err


def test_a_port_that_docker_finds_taken_is_replaced_by_the_next() -> None:
    """Somebody on another address of this machine, say: our own look does not see it."""
    with on_host("--refuse-start", "driver failed: Bind for 127.0.0.1:1 failed: port is already allocated") as host:
        done = host.run("run", host.model(), "-d")
        ports = [next(iter(each["HostConfig"]["PortBindings"].values()))[0]["HostPort"] for each in _created(host)]
    assert done.code == 10
    assert len(set(ports)) == 20
    assert "error: the port is in use" in done.err


def _created(host: Host) -> list[dict[str, Any]]:
    return host.asked("containers/create")


def test_an_address_that_this_machine_lacks_is_refused() -> None:
    with on_host() as host:
        done = host.run("run", host.model(), "--bind", "192.0.2.1", "-d")
    assert done.code == 10
    assert "error: --bind is not an address of this machine: 192.0.2.1" in done.err


def test_an_empty_key_file_is_said() -> None:
    with on_host("--key", "empty") as host:
        done = host.run("run", host.model(), "--name", "one", "-d", "--port", str(free_port()))
    assert done.code == 50
    assert "error: the key file on the volume is empty: /data/secrets/api_key" in done.err
    assert "docker exec appliance-one rm /data/secrets/api_key" in done.err


def test_without_authorization_no_key_is_looked_for() -> None:
    with on_host("--key", "none", "--wanted-key", "") as host:
        done = host.run("run", host.model(), "-d", "--port", str(free_port()), "--set", "auth=off")
    assert done.code == 0, done.err
    assert "key       not required" in done.out


@pytest.mark.parametrize(
    ("words", "code", "said", "hint"),
    [
        (["--set", "paralel=8"], 10, "unknown setting in environment: APPLIANCE_PARALEL", "APPLIANCE_PARALLEL"),
        (["--set", "parallel=x"], 10, "setting parallel is not a whole number: 'x'", "--parallel N"),
        (["--set", "port=1"], 2, "--set takes NAME=VALUE", "parallel=8"),
        (["--mode", "sped"], 10, "perhaps you meant 'speed'", "--mode MODE"),
        (["--ctx-size", "7"], 10, "is outside 256", "--ctx-size"),
        (["--port", "70000"], 2, "--port is outside 1 to 65535: 70000", "omit --port"),
        (["--prot", "1"], 2, "unknown argument: --prot", "perhaps you meant '--port'"),
        (["--cpu", "--gpus", "all"], 2, "--cpu and --gpus all exclude each other", "give only one"),
        (["--gpus", ""], 2, "--gpus has an empty name", "indices"),
        (["--image", "appliance:none"], 10, "no such image here: appliance:none", "there are: appliance:llama-cpu"),
    ],
)
def test_bad_words_are_refused(words: list[str], code: int, said: str, hint: str) -> None:
    with on_host("--nvidia-runtime") as host:
        host.gpu(RTX_4090)
        done = host.run("run", host.model(), "-d", *words)
        assert host.asked("containers/create") == []
    assert (done.code, done.out) == (code, ""), done.err
    assert said in done.err
    assert hint in done.err


def test_all_that_would_stop_it_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "pg_wal").mkdir()
    with on_host("--volume", str(tmp_path)) as host:
        words = ("--port", "70000", "--set", "parallel=x", "--cpu", "--gpus", "all")
        done = host.run("run", f"{host.folder}/none.gguf", "-d", *words)
        alone = host.run("run", host.model(), "-d")
        assert host.asked("containers/create") == []
    assert [line.split(": ")[1] for line in done.err.splitlines() if line.startswith("error: ")] == [
        "no such model file",
        "setting parallel is not a whole number",
        "--port is outside 1 to 65535",
        "--cpu and --gpus all exclude each other",
        "volume appliance is not the appliance's",
    ]
    assert (done.code, done.err.count("\nhint: ")) == (30, 5)
    assert (alone.code, alone.out) == (50, "")
    assert (
        "error: volume appliance is not the appliance's: it holds pg_wal\n\nhint: use another one: --volume NAME; "
        in (alone.err)
    )


def test_a_file_that_is_missing_names_its_near_miss() -> None:
    with on_host() as host:
        host.model("SmolLM.gguf")
        done = host.run("run", f"{host.folder}/SmolLN.gguf")
    assert done.code == 30
    assert f"perhaps you meant {host.folder}/SmolLM.gguf" in done.err


# Docker itself.


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("unix:///nowhere/docker.sock", "Docker is"),
        ("tcp://127.0.0.1:1", "Docker is"),
        ("nonsense://x", "Docker returned an unexpected error"),
    ],
)
def test_no_daemon_is_said(address: str, said: str) -> None:
    with on_host(daemon=False) as host:
        host.environment["DOCKER_HOST"] = address
        for words in (["run", host.model()], ["list"], ["status"], ["stop"], ["chat"], ["logs"], ["upgrade"]):
            done = host.run(*words)
            assert done.code == 10, done.err
            assert f"error: {said}" in done.err
            assert "hint: " in done.err


def test_a_missing_docker_and_a_stopped_one_are_told_apart() -> None:
    with on_host(daemon=False) as host:
        host.environment["PATH"] = f"{host.folder}/bin"
        missing = host.run("list")
        docker = host.folder / "bin/docker"
        docker.parent.mkdir()
        docker.write_text("#!/bin/sh\n")
        docker.chmod(0o755)
        stopped = host.run("list")
    assert "error: Docker is missing" in missing.err
    assert "error: Docker is stopped" in stopped.err
    assert "systemctl start docker" in stopped.err


def test_a_daemon_that_fails_is_said() -> None:
    with on_host("--broken", "the disk is full") as host:
        done = host.run("run", host.model())
    assert done.code == 10
    assert "error: Docker returned an unexpected error" in done.err
    assert "the disk is full" in done.err


# GPUs.


@pytest.mark.parametrize(
    ("knobs", "words", "asked"),
    [
        (["--nvidia-runtime"], [], ["", -1, [], [["gpu"]]]),
        (["--nvidia-runtime"], ["--gpus", "0,1"], ["", 0, ["0", "1"], [["gpu"]]]),
        (["--cdi", "nvidia.com/gpu=all"], [], ["cdi", 0, ["nvidia.com/gpu=all"], []]),
        (
            ["--nvidia-runtime", "--cdi", "nvidia.com/gpu=0"], ["--gpus", "nvidia.com/gpu=0"],
            ["cdi", 0, ["nvidia.com/gpu=0"], []],
        ),
    ],
)  # fmt: skip
def test_a_gpu_is_given_by_the_runtime_or_by_cdi(knobs: list[str], words: list[str], asked: list[Any]) -> None:
    with on_host("--image", CUDA, "--label", "io.appliance.sm=89", *knobs) as host:
        host.gpu(RTX_4090)
        done = host.run("run", host.model(), "-d", "--image", CUDA, "--port", str(free_port()), *words)
        assert done.code == 0, done.err
        [request] = host.created()["HostConfig"]["DeviceRequests"]
    assert [request[name] for name in ("Driver", "Count", "DeviceIDs", "Capabilities")] == asked


def test_the_image_of_the_gpu_is_chosen_and_building_it_is_asked_for() -> None:
    """`python -m images select`, as a program."""
    with on_host("--nvidia-runtime") as host:
        host.gpu(RTX_4090)
        done = host.run("run", host.model(), "-d")
    assert done.code == 10
    found = re.search(r"error: no such image here: (appliance:llama-cu\d+-sm89)\n", done.err)
    assert found, done.err
    assert f"images build --only {found[1].removeprefix('appliance:')} --base auto" in done.err


def test_on_the_cpu_the_gpu_is_left_alone() -> None:
    with on_host("--nvidia-runtime") as host:
        host.gpu(RTX_4090)
        done = host.run("run", host.model(), "-d", "--cpu", "--port", str(free_port()))
        assert done.code == 0, done.err
        created = host.created()
    assert created["Image"] == IMAGE
    assert not created["HostConfig"].get("DeviceRequests")


@pytest.mark.parametrize(
    ("knobs", "rows", "words", "code", "said"),
    [
        ([], [RTX_4090], [], 23, "Docker cannot give containers this machine's GPU: NVIDIA GeForce RTX 4090"),
        (["--nvidia-runtime"], [], ["--gpus", "all"], 23, "GPUs were requested, but nvidia-smi shows none: --gpus all"),
        (["--cdi", "nvidia.com/gpu=0", "--cdi", "nvidia.com/gpu=1"], [RTX_4090], ["--gpus", "nvidia.com/gpu=7"], 23,
         "no such CDI device: nvidia.com/gpu=7"),
        (["--nvidia-runtime"], ["NVIDIA H100 PCIe, 580.95.05, 9.0, 81559"], [], 20, "the image is for another GPU"),
        (["--nvidia-runtime", "--label", "io.appliance.driver.floor.sass=580"],
         ["NVIDIA GeForce RTX 4090, 535.10, 8.9, 24564"], [], 21, "the driver is too old"),
        (["--nvidia-runtime"], [], [], 23, "the image is for GPUs, but no GPU is used"),
        (["--nvidia-runtime", "--refuse-start", 'could not select device driver "" with capabilities: [[gpu]]'],
         [RTX_4090], [], 23, "Docker cannot give the container a GPU"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_never_replaced_by_the_cpu(
    knobs: list[str], rows: list[str], words: list[str], code: int, said: str
) -> None:
    with on_host("--image", CUDA, "--label", "io.appliance.sm=89", *knobs) as host:
        if rows:
            host.gpu(*rows)
        done = host.run("run", host.model(), "-d", "--image", CUDA, *words)
        assert "no appliance" in host.run("list").out
    assert done.code == code, done.err
    assert said in done.err
    assert "hint: " in done.err


def test_a_driver_that_tells_no_compute_capability_is_asked_without_it() -> None:
    """Driver 470 tells none. The message names the image's driver floor, and not an nvidia-smi that "failed"."""
    labels = ("--label", "io.appliance.sm=75", "--label", "io.appliance.driver.floor.sass=525")
    with on_host("--image", CUDA, *labels, "--nvidia-runtime") as host:
        host.gpu("Tesla T4, 470.256.02", lacking="compute_cap")
        done = host.run("run", host.model(), "-d", "--image", CUDA)
    assert done.code == 21, done.err
    assert "470.256.02, it needs 525" in done.err


def test_an_nvidia_smi_that_fails_is_not_a_machine_without_a_gpu() -> None:
    with on_host() as host:
        host.gpu("NVIDIA-SMI has failed because it could not communicate with the driver", code=9)
        done = host.run("run", host.model(), "-d")
    assert done.code == 23
    assert "nvidia-smi failed with exit 9: NVIDIA-SMI has failed" in done.err


# Images.


def test_a_name_that_nobody_owns_is_never_pulled_and_one_of_a_registry_is() -> None:
    with on_host() as host:
        assert host.run("run", host.model(), "-d", "--image", "appliance:other").code == 10
        assert host.asked("images/create") == []
        done = host.run(
            "run", host.model(), "-d", "--image", "registry.example/me/appliance:x", "--port", str(free_port())
        )
        assert done.code == 0, done.err
        assert "pulling registry.example/me/appliance:x" in done.err
        assert host.created()["Image"] == "registry.example/me/appliance:x"


@pytest.mark.parametrize(("knob", "said"), [("refused", "pull access denied"), ("error", "unexpected EOF")])
def test_an_image_that_cannot_be_pulled_is_said(knob: str, said: str) -> None:
    with on_host("--pull", knob) as host:
        done = host.run("run", host.model(), "-d", "--image", "registry.example/me/appliance:x")
    assert done.code == 10
    assert "error: the image cannot be pulled: registry.example/me/appliance:x" in done.err
    assert said in done.err


def test_a_prefix_moves_the_names_of_images() -> None:
    with on_host("--image", "registry.example/me/appliance:llama-cpu") as host:
        host.environment["IMAGE_PREFIX"] = "registry.example/me/appliance"
        done = host.run("run", host.model(), "-d", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == "registry.example/me/appliance:llama-cpu"


def test_under_a_prefix_that_has_none_the_local_name_is_taken_and_nothing_is_pulled_without_a_registry() -> None:
    with on_host() as host:
        host.environment["IMAGE_PREFIX"] = "mine"
        done = host.run("run", host.model(), "-d", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == IMAGE
        assert host.run("run", host.model("t.gguf"), "-d", "--image", "me/appliance:x").code == 10
        assert host.asked("images/create") == []


def test_a_recipe_takes_its_own_image() -> None:
    with on_host("--image", "appliance/qwen:llama-cpu") as host:
        done = host.run("run", "qwen", "-d", "--port", str(free_port()))
        assert done.code == 0, done.err
        created = host.created()
    assert created["Image"] == "appliance/qwen:llama-cpu"
    assert not [word for word in created["Env"] if word.startswith("APPLIANCE_MODEL")]


def test_a_recipe_that_does_not_exist_is_said_by_the_program_that_knows() -> None:
    with on_host() as host:
        done = host.run("run", "qwem", "-d")
    assert done.code == 10
    assert "qwem" in done.err
    assert "qwen" in done.err


# Installed without a clone.


@contextmanager
def installed(*knobs: str) -> Iterator[Host]:
    """Yield a host whose package has no `build_matrix.yaml` beside it."""
    with on_host(*knobs) as host:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "appliance", host.folder / "lib/appliance", ignore=ignored)
        host.place = host.folder / "lib"
        yield host


@pytest.mark.parametrize(("gpus", "image"), [([], IMAGE), ([RTX_4090], CUDA)])
def test_without_a_clone_the_image_is_chosen_by_its_labels(gpus: list[str], image: str) -> None:
    sm = "io.appliance.sm=none" if image == IMAGE else "io.appliance.sm=89"
    with installed("--image", image, "--label", sm, "--nvidia-runtime") as host:
        host.gpu(*gpus or ["No devices were found"], code=0 if gpus else 6)
        done = host.run("run", host.model(), "-d", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == image


def test_without_a_clone_and_an_image_it_says_that_building_needs_one() -> None:
    with installed("--image", "other:x", "--label", "io.appliance.sm=75") as host:
        done = host.run("run", host.model(), "-d")
    assert done.code == 10
    said = "there is no image for this machine: none is published yet, and building needs a clone"
    assert f"error: {said}\n" in done.err
    assert "in a clone of the project `make up` builds one" in done.err


# Installed from a wheel, with published images.

DIGEST = f"sha256:{'a' * 64}"


@contextmanager
def from_wheel(cell: str, *knobs: str, recipe: str | None = "qwen") -> Iterator[Host]:
    """Yield a host with the tree of a wheel, for which one image is published."""
    labels = ("--label", f"io.appliance.cell={cell}", *(("--label", f"io.appliance.recipe={recipe}") if recipe else ()))
    with on_host("--image", "other:x", *labels, *knobs) as host:
        host.place = host.folder / "lib"
        data = json.loads((ROOT / "images/inventory.json").read_text())
        image = f"registry.example/me/appliance/{recipe or ''}:{cell}"
        row = {"cell": cell, "recipe": recipe, "image": image, "digest": DIGEST, "compressed_bytes": 99_000_000}
        wheel.stage(ROOT, host.place, {**data, "images": [row]}, name="owner-appliance")
        yield host


PINNED = f"registry.example/me/appliance/qwen@{DIGEST}"


def test_a_published_image_is_pulled_by_its_digest_and_once() -> None:
    with from_wheel("llama-cpu") as host:
        for name in ("one", "two"):
            done = host.run("run", "qwen", "-d", "--cpu", "--name", name, "--port", str(free_port()))
            assert done.code == 0, done.err
            assert (f"pulling {PINNED} (99 MB)\n" in done.err) is (name == "one")
            assert host.created()["Image"] == PINNED
        done = host.run("upgrade", "one")
        assert (done.code, done.out) == (0, f"one is up to date: {PINNED}\n"), done.err
        assert len(host.asked("images/create")) == 1


def test_an_upgrade_takes_the_digest_of_a_newer_command() -> None:
    with from_wheel("llama-cpu") as host:
        done = host.run("run", "qwen", "-d", "--cpu", "--name", "one", "--port", str(free_port()))
        assert done.code == 0, done.err
        inventory = host.place / "appliance/host/docker/inventory.json"
        newer = f"sha256:{'b' * 64}"
        inventory.write_text(inventory.read_text().replace(DIGEST, newer))
        done = host.run("upgrade", "one", "--no-measure")
        assert done.code == 0, done.err
        assert host.created()["Image"] == f"registry.example/me/appliance/qwen@{newer}"


def test_the_published_image_of_the_gpu_is_chosen() -> None:
    labels = ("--label", "io.appliance.sm=86", "--label", "io.appliance.driver.floor.sass=580")
    with from_wheel("llama-cu130-sm86", *labels, "--nvidia-runtime") as host:
        host.gpu(RTX_4090)
        done = host.run("run", "qwen", "-d", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == PINNED
        host.gpu("NVIDIA H100, 580.95.05, 9.0, 81559")
        done = host.run("run", "qwen", "-d", "--name", "other")
        assert (done.code, done.out) == (20, "")
        assert "error: no image is published for this machine's GPU: NVIDIA H100 (sm_90)" in done.err
        host.gpu(RTX_4090.replace("580.95.05", "550.54.14"))
        done = host.run("run", "qwen", "-d", "--name", "other")
        assert (done.code, done.out) == (21, "")
        assert "error: the driver is too old for every published image: 550.54.14" in done.err


def test_a_pull_that_fails_names_the_image_that_is_here() -> None:
    with from_wheel("llama-cpu", "--image", "appliance/qwen:llama-cpu", "--pull", "refused") as host:
        done = host.run("run", "qwen", "-d", "--cpu")
        assert (done.code, done.out) == (10, "")
        assert f"error: the image cannot be pulled: {PINNED}: pull access denied" in done.err
        assert "hint: docker login, or the image of this machine: --image appliance/qwen:llama-cpu" in done.err
        done = host.run("run", "qwen", "-d", "--cpu", "--image", "appliance/qwen:llama-cpu")
        assert done.code == 0, done.err


def test_another_content_than_the_published_is_61() -> None:
    with from_wheel("llama-cpu", "--pull", "tampered") as host:
        done = host.run("run", "qwen", "-d", "--cpu")
    assert (done.code, done.out) == (61, "")
    assert f"error: the registry's image is not the published one: {PINNED}: " in done.err
    assert "hint: do not use this registry or mirror" in done.err


def test_an_image_of_other_labels_than_its_row_is_61() -> None:
    with from_wheel("llama-cpu", "--label", "io.appliance.cell=llama-cu130-sm86") as host:
        done = host.run("run", "qwen", "-d", "--cpu")
    assert (done.code, done.out) == (61, "")
    assert "it is qwen on llama-cu130-sm86, not qwen on llama-cpu" in done.err


def test_a_recipe_without_a_published_image_names_those_that_have_one() -> None:
    with from_wheel("llama-cpu") as host:
        done = host.run("run", "gemma", "-d", "--cpu")
    assert (done.code, done.out) == (10, "")
    assert "error: no image of gemma is published: published are qwen\n" in done.err


def test_a_prefix_takes_the_mirrors_image_by_its_tag() -> None:
    with from_wheel("llama-cpu") as host:
        host.environment["IMAGE_PREFIX"] = "mirror.example/team"
        done = host.run("run", "qwen", "-d", "--cpu", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == "mirror.example/team/qwen:llama-cpu"


def test_building_is_refused_without_a_clone_before_anything_is_made() -> None:
    with from_wheel("llama-cpu") as host:
        done = host.run("run", "qwen", "-d", "--cpu", "--build")
        assert host.asked("images/create") == []
    assert (done.code, done.out) == (10, "")
    assert "error: --build needs a clone of the project, and this command is installed without" in done.err


def test_a_damaged_inventory_is_said() -> None:
    with from_wheel("llama-cpu") as host:
        (host.place / "appliance/host/docker/inventory.json").write_text('{"recipes": []}')
        done = host.run("run", "qwen", "-d")
    assert (done.code, done.out) == (10, "")
    assert "error: data of this package cannot be read: " in done.err


# Building, with a program in place of the build half.


@contextmanager
def clone(*knobs: str) -> Iterator[Host]:
    with installed("--image", "other:x", *knobs) as host:
        (host.place / "images").mkdir()
        (host.place / "images/__init__.py").touch()
        shutil.copy(ROOT / "tests/fakes/fake_images.py", host.place / "images/__main__.py")
        (host.place / "build_matrix.yaml").touch()
        yield host


@pytest.mark.parametrize(
    ("model", "words", "image"),
    [
        (None, "build --only llama-cpu --base auto", "appliance:llama-cpu"),
        ("qwen", "build --only llama-cpu --base auto --model qwen", "appliance/qwen:llama-cpu"),
    ],
)
@pytest.mark.parametrize("prefix", [None, "mine"])
def test_an_image_that_is_not_here_is_built(model: str | None, words: str, image: str, prefix: str | None) -> None:
    with clone() as host:
        if prefix:
            host.environment["IMAGE_PREFIX"] = prefix
        done = host.run("run", model or host.model(), "-d", "--yes", "--cpu", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == image
    assert f"building: python3 -m images {words}\n" in done.err
    assert f"compiling {words}\n" in done.err
    assert "compiling" not in done.out


def test_a_build_that_fails_ends_with_60_and_its_words() -> None:
    with clone() as host:
        host.environment["FAKE_BUILD_CODE"] = "61"
        done = host.run("run", host.model(), "-d", "--yes")
    assert (done.code, done.out) == (60, "")
    assert "compiling build" in done.err
    assert (
        "error: the image was not built: python3 -m images build --only llama-cpu --base auto ended with 61" in done.err
    )


def test_a_model_of_a_recipe_by_the_name_that_people_know() -> None:
    with clone() as host:
        shutil.copy(ROOT / "images/inventory.json", host.place / "images")
        done = host.run("run", "Qwen3-30B-A3B", "--dry-run", "--yes", "--cpu")
        unknown = host.run("run", "Qwen3.6-27B", "--dry-run", "--yes", "--cpu")
    assert done.code == 0, done.err
    assert done.out.endswith(" appliance/qwen:llama-cpu\n")
    assert "--env APPLIANCE_MODEL=qwen:30b-a3b-q4_k_m " in done.out
    assert "note: Qwen3-30B-A3B is read as the recipe qwen:30b-a3b-q4_k_m" in done.err
    assert (unknown.code, unknown.out) == (10, "")
    assert (
        "error: no recipe has a model of this name: Qwen3.6-27B\n\nhint: perhaps you meant Qwen3.8-27B" in unknown.err
    )


def test_what_the_build_half_refuses_is_passed_on() -> None:
    with clone() as host:
        host.environment["FAKE_SELECT_ERROR"] = "no recipe qwem"
        done = host.run("run", "qwem", "-d", "--yes")
    assert done.code == 10
    assert "error: no image can be chosen for this machine: no recipe qwem\n\nhint: do this" in done.err


def test_build_takes_the_clones_image_although_one_is_published() -> None:
    with clone() as host:
        data = json.loads((ROOT / "images/inventory.json").read_text())
        image = "registry.example/me/appliance/qwen:llama-cpu"
        row = {"cell": "llama-cpu", "recipe": "qwen", "image": image, "digest": DIGEST, "compressed_bytes": 1}
        (host.place / "images/inventory.json").write_text(json.dumps({**data, "images": [row]}))
        line = host.run("run", "qwen", "--cpu", "--dry-run")
        assert line.out.endswith(f" {PINNED}\n"), line.err
        done = host.run("run", "qwen", "-d", "--cpu", "--build", "--port", str(free_port()))
        assert done.code == 0, done.err
        assert host.created()["Image"] == "appliance/qwen:llama-cpu"


def test_an_upgrade_builds_what_the_clone_holds() -> None:
    with clone() as host:
        started = host.run("run", host.model(), "-d", "--yes", "--name", "one", "--port", str(free_port()))
        assert started.code == 0, started.err
        done = host.run("upgrade", "--yes")
    assert (done.code, done.out) == (0, "one is up to date: appliance:llama-cpu\n")
    assert "compiling build --only llama-cpu" in done.err
