"""The steps of the workflows' jobs, run as a forge runs them, up to what only a forge has.

Each step's own shell runs; the programs that it would reach the world with are one that writes down how it was called.
What it asks of the build half is asked of the real one, dry.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from images import __main__ as command
from images.ci import ci_steps
from images.ci.ci_steps import Step
from images.errors import MatrixError
from images.recipes import recipe

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "d" * 64
PUSHED = f"registry.example/appliance:llama-cpu-amd64@{DIGEST}"
RECORDER = f"""#!/bin/sh
printf '%s' "${{0##*/}}" >> "$CALLS"; printf ' %s' "$@" >> "$CALLS"; echo >> "$CALLS"
case "${{0##*/}} $*" in
  'git diff --cached --quiet' | 'git diff --quiet') exit 1 ;;
  'gh pr list '*) echo 0 ;;
  'docker buildx imagetools inspect '*) echo '{{"digest": "{DIGEST}"}}' ;;
  *'images list --json') echo '[{{"base": "debian:bookworm-slim"}}, {{"base": "debian:trixie-slim"}}]' ;;
  *'images build '*' --push '*) echo {PUSHED} ;;
esac
"""
WORLD = ("docker", "gh", "git", "make", "sudo")  # and the project's Python
PUSHES = "github.event_name != 'pull_request' && vars.REGISTRY || ''"
# What the forge would put in the place of an expression, for a job of one cell that is pushed.
VALUES = {
    "github.event.pull_request.base.sha": "",
    PUSHES: "registry.example/appliance",
    "github.ref": "refs/heads/main",
    "github.repository": "team/appliance",
    "github.server_url": "https://git.example",
    "github.token": "a-token",
    "inputs.cell": "llama-cpu",
    "inputs.models": "demo qwen",
    "inputs.only || '.*'": "llama-cpu",
    "matrix.arch": "amd64",
    "needs.build.outputs.amd64": DIGEST,
    "needs.build.outputs.arm64": "",
    "needs.list.outputs.cells": '[{"cell": "llama-cpu"}]',
    "needs.list.outputs.models": "demo qwen",
    "vars.LARGE_RUNNER": "",
    "vars.REGISTRY": "registry.example/appliance",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A checkout with nothing in it but what the steps read."""

    folder: Path
    values: dict[str, str] = field(default_factory=lambda: dict(VALUES))

    def run(self, step: Step, **more: str) -> subprocess.CompletedProcess[str]:
        assert step.script is not None
        given = {name: ci_steps.filled(text, self.values) for name, text in step.environment.items()}
        forge = {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary"}
        own = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "GITHUB_ACTOR": "somebody",
            "GITHUB_REF_NAME": "main",
            "GITHUB_REF_TYPE": "branch",
            "GITHUB_REPOSITORY_OWNER": "team",
            **{name: str(self.folder / file) for name, file in forge.items()},
        }
        words = ("bash", "--noprofile", "--norc", "-c", step.script)
        return subprocess.run(
            words, cwd=self.folder, env={**own, **given, **more}, capture_output=True, text=True, check=False
        )

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text("utf-8").splitlines() if file.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    programs = [*(tmp_path / "bin" / name for name in WORLD), tmp_path / ".venv/bin/python"]
    for program in programs:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(RECORDER, "utf-8")
        program.chmod(0o755)
    return Place(folder=tmp_path)


def job(name: str) -> dict[str, Step]:
    """Return the job's steps that have a shell, by name."""
    workflow, _, wanted = name.partition("/")
    found = [step for step in ci_steps.load(ROOT) if (step.workflow, step.job) == (workflow, wanted)]
    return {step.name: step for step in found if step.script}


def ran(place: Place, name: str, **more: str) -> list[str]:
    """Run the job's steps one after the other, and return the programs that they called. None may fail."""
    for step in job(name).values():
        if step.name not in ("Containerd image store", "Free disk"):  # of the runner alone
            done = place.run(step, **more)
            assert done.returncode == 0, (step.name, done.stderr)
    return place.lines("calls")


def asked(calls: list[str]) -> list[list[str]]:
    """Return the words of each call of the build half."""
    mark = "python -m images "
    return [line.removeprefix(mark).split() for line in calls if line.startswith(mark)]


def test_a_cell_is_built_gated_and_pushed(place: Place) -> None:
    """The job `image / build` runs these steps. The build half itself accepts each command that they give it."""
    calls = ran(place, "image/build")
    assert [words[0] for words in asked(calls)] == ["build", "verify", "build", "build", "build"]
    address = "https://git.example/team/appliance"
    named = ["--source", address, "--url", address, "--vendor", "team"]
    for words in asked(calls):
        assert words[1:3] == ["--only", "llama-cpu"]
        assert words[0] == "verify" or " ".join(named) in " ".join(words)
        assert command.main([*words, "--dry-run"]) == 0
    assert [words[words.index("--model") + 1 :][:1] for words in asked(calls)[3:]] == [["demo"], ["qwen"]]
    assert ["--bake-weights" in words for words in asked(calls)] == [False, False, False, True, False]
    cache = "type=registry,ref=registry.example/appliance-cache:llama-cpu-amd64"
    assert asked(calls)[0][4:8] == ["--cache-from", cache, "--cache-to", f"{cache},mode=max"]
    assert place.lines("output") == [f"amd64={DIGEST}"]
    assert "docker login --username somebody --password-stdin registry.example" in calls
    assert not [line for line in calls if "a-token" in line]  # on stdin, where no list of processes shows it


def test_without_a_registry_nothing_leaves_the_runner(place: Place) -> None:
    place.values.update(dict.fromkeys(("vars.REGISTRY", PUSHES), ""))
    steps = job("image/build")
    assert {steps[name].condition for name in ("Log in", "Push")} == {"env.REGISTRY != ''"}
    for name in ("Build", "Gate"):
        assert place.run(steps[name]).returncode == 0
    assert "--cache-from" not in " ".join(place.lines("calls"))


def test_a_pull_request_reads_the_cache_and_writes_none(place: Place) -> None:
    place.values[PUSHES] = ""
    assert place.run(job("image/build")["Build"]).returncode == 0
    (words,) = asked(place.lines("calls"))
    assert words[4:6] == ["--cache-from", "type=registry,ref=registry.example/appliance-cache:llama-cpu-amd64"]
    assert "--cache-to" not in words


@pytest.mark.parametrize(
    ("touched", "cells"),
    [
        (["llama-cpu"], ["llama-cpu"]),
        (["llama-cu130-sm90", "llama-cu130-sm86", "vllm-cpu"], ["llama-cu130-sm86", "vllm-cpu"]),
        (["gone"], []),
    ],
)
def test_a_pull_request_builds_the_cells_that_it_touches(place: Place, touched: list[str], cells: list[str]) -> None:
    place.values.update({"inputs.only || '.*'": ".*", "github.event.pull_request.base.sha": "a1b2c3"})
    lines = "".join(f"images/rendered/{name}/Dockerfile\n" for name in touched)
    (place.folder / "bin/git").write_text(f"#!/bin/sh\nprintf '{lines}'\n", "utf-8")
    done = place.run(job("images/list")["List cells"])
    assert done.returncode == 0, done.stderr
    found = json.loads(place.lines("output")[0].removeprefix("cells="))
    assert [each["cell"] for each in found] == cells


@pytest.mark.parametrize(("kind", "name", "more"), [("branch", "main", ()), ("tag", "v1.2", (":1.2-llama-cpu",))])
def test_an_index_is_made_of_what_was_pushed(place: Place, kind: str, name: str, more: tuple[str, ...]) -> None:
    calls = ran(place, "image/merge", GITHUB_REF_TYPE=kind, GITHUB_REF_NAME=name)
    words = next(line for line in calls if "imagetools create" in line).split()
    tags = [value for flag, value in itertools.pairwise(words) if flag == "--tag"]
    assert tags[0] == "registry.example/appliance:llama-cpu"
    assert tags[1].removeprefix("registry.example/appliance:llama-cpu-").isdecimal()
    assert tags[2:] == [f"registry.example/appliance{tag}" for tag in more]
    assert words[-1] == f"registry.example/appliance@{DIGEST}"  # arm64 gave none
    assert place.lines("output") == [f"digest={DIGEST}"]


def test_images_of_models_are_merged_of_what_was_built(place: Place) -> None:
    calls = [line for line in ran(place, "image/merge") if "imagetools create" in line]
    assert [line.rpartition("--tag ")[2] for line in calls[1:]] == [
        f"registry.example/appliance/{name}:llama-cpu registry.example/appliance/{name}:llama-cpu-amd64"
        for name in ("demo", "qwen")
    ]


def test_digests_and_sizes_are_proposed(place: Place) -> None:
    calls = ran(place, "images/published")
    words, rendered = asked(calls)
    assert words[:5] == ["published", "--registry", "registry.example/appliance", "--only", "llama-cpu"]
    assert command.main([*words, "--dry-run"]) == 0
    assert rendered == ["render"]
    assert [line for line in calls if line.startswith("gh pr create")]


def test_the_cells_of_a_run_are_chosen_by_name(place: Place) -> None:
    ran(place, "images/list")
    line, models = place.lines("output")
    assert models == "models=demo qwen"
    assert [each["cell"] for each in json.loads(line.removeprefix("cells="))] == ["llama-cpu"]
    place.values["inputs.only || '.*'"] = "no-such"
    done = place.run(job("images/list")["List cells"])
    assert (done.returncode, done.stderr.strip()) == (2, "no cell matches: no-such")


@pytest.mark.parametrize("label", ["", "big-disk"])
def test_a_cell_that_needs_a_larger_runner_is_built_where_one_is_named(place: Place, label: str) -> None:
    place.values.update({"inputs.only || '.*'": "vllm-.*", "vars.LARGE_RUNNER": label})
    ran(place, "images/list")
    cells = {each["cell"]: each for each in json.loads(place.lines("output")[0].removeprefix("cells="))}
    assert set(cells) == {"vllm-cpu", "vllm-cu130"} if label else {"vllm-cpu"}
    runners = {name: {each["runner"] for each in cell["platforms"]} for name, cell in cells.items()}
    assert runners["vllm-cpu"] == {"ubuntu-24.04"}
    assert runners.get("vllm-cu130") == ({label} if label else None)


def test_without_a_choice_the_images_of_all_recipes_are_pushed(place: Place) -> None:
    place.values["inputs.models"] = ""
    shutil.copytree(ROOT / "images/models", place.folder / "images/models")
    ran(place, "images/list")
    assert place.lines("output")[1] == f"models={' '.join(recipe.names(ROOT))}"


def test_fresh_locks_are_proposed_once(place: Place) -> None:
    calls = ran(place, "lock/propose")
    assert asked(calls)[1:] == [
        ["lock", "--bases", "bookworm", "trixie"],
        ["lock", "--debian", "--platform", "linux/amd64"],
        ["lock", "--debian", "--platform", "linux/arm64"],
        ["render"],
    ]
    assert [line for line in calls if line.startswith("docker pull")] == [
        "docker pull --quiet debian:bookworm-slim",
        "docker pull --quiet debian:trixie-slim",
    ]
    assert [line.partition(" --")[0] for line in calls if line.startswith("gh ")] == [
        "gh auth setup-git",
        "gh pr list",
        "gh pr create",
    ]


def test_wheels_are_held_to_their_index_before_newer_ones_are_proposed(place: Place) -> None:
    calls = ran(place, "lock/wheels")
    assert asked(calls) == [["lock", "--check"], ["lock", "--upgrade", "appliance", "dev", "router"], ["render"]]
    for words in asked(calls):
        assert command.main([*words, "--dry-run"]) == 0
    pushed = next(line for line in calls if line.startswith("git push"))
    assert pushed.endswith("HEAD:refs/heads/wheel-locks")
    (proposed,) = [line for line in calls if line.startswith("gh pr create")]
    assert "--head wheel-locks --title Wheels, refreshed" in proposed
    (place.folder / ".venv/bin/python").write_text("#!/bin/sh\necho stranger; exit 61\n", "utf-8")
    assert place.run(job("lock/wheels")["Hold"]).returncode == 61


def test_a_newer_engine_is_proposed_with_its_facts_plans_and_figures(place: Place) -> None:
    (place.folder / ".make/before").mkdir(parents=True)
    calls = ran(place, "lock/engine")
    before = ["build", "--only", "llama-cpu", "--locked", "--tag", "before:engine"]
    gated = [before[:4], ["verify", "--only", "llama-cpu", "--record"]]
    assert asked(calls) == [["pin"], ["render"], *gated, ["render"], before, ["fetch", "demo"]]
    for words in asked(calls)[1:]:
        assert command.main([*words, "--dry-run"]) == 0
    assert [words.split()[2] for words in calls if words.startswith("python -m") and "images" not in words] == [
        "tests.golden.printed",
        "tests.golden.plans",
        "benchmarks.court",
    ]
    assert place.lines("output") == ["is_new=yes"]
    assert next(line for line in calls if line.startswith("git push")).endswith("HEAD:refs/heads/engine-pin")
    # A patch that does not apply ends the job before anything is built.
    (place.folder / ".venv/bin/python").write_text("#!/bin/sh\necho a patch; exit 61\n", "utf-8")
    assert place.run(job("lock/engine")["Pin"]).returncode == 61


def test_a_step_that_fails_ends_its_job(place: Place) -> None:
    """A gate that does not hold must not be pushed."""
    (place.folder / ".venv/bin/python").write_text("#!/bin/sh\nexit 61\n", "utf-8")
    assert place.run(job("image/build")["Gate"]).returncode == 61
    assert place.run(job("image/build")["Build"]).returncode == 61
    assert place.run(job("lock/propose")["Lock"]).returncode == 61


def test_the_steps_are_written_for_a_linter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ci-steps", "image/build", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("(an action): actions/checkout")
    assert said[-1] == "image-build-7.sh: Push"
    assert (tmp_path / "image-build-6.sh").read_text("utf-8").startswith("#!/usr/bin/env bash\nset -e\n")
    assert command.main(["ci-steps", "image/biuld"]) == 2
    assert "no such job: image/biuld" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"run": "ls", "shell": "pwsh"}, "another shell than bash: pwsh"),
        ({"run": "echo ${{ inputs.cell }}"}, r"part of a script: \$\{\{ inputs.cell \}\}"),
    ],
)
def test_a_script_that_cannot_be_checked_is_refused(step: Mapping[str, str], said: str) -> None:
    with pytest.raises(MatrixError, match=said):
        list(ci_steps.parse("x", {"jobs": {"y": {"steps": [step]}}}))
