"""The benchmark of vLLM's start against a `docker` whose containers answer at once."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.stages.boot import ROOT

FAKE = ROOT / "tests/fakes/fake_docker_cli.py"
PLANNED = ["/opt/vllm/bin/vllm", "serve", "/model", "--uds", "/run/appliance.sock", "--max-model-len", "2048",
           "--enforce-eager"]  # fmt: skip


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (folder / "planned").write_text(shlex.join(PLANNED))
        docker = folder / "docker"
        docker.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {FAKE} "$@"\n')
        docker.chmod(0o755)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "FAKE_DOCKER": str(self.folder)}
        argv = (sys.executable, "-m", "benchmarks.vllm_start", "--model", str(self.model), *words)
        return subprocess.run(argv, cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=300)

    @property
    def started(self) -> list[list[str]]:
        calls = [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
        return [call for call in calls if call[0] == "run" and call[-1] != "--dry-run"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_pairs_are_of_the_plan_s_own_command_line_and_the_ratio_is_printed(bench: Bench) -> None:
    done = bench.run("--pairs", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["argv"] == PLANNED
    assert found["pairs"] == len(found["appliance_s"]) == len(found["bare_s"]) == 1
    assert found["ratio"] > 0
    assert len(bench.started) == 4
    bare = [call for call in bench.started if "--entrypoint" in call]
    flags = ["serve", "/model", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "2048", "--enforce-eager"]
    assert [call[-len(flags) :] for call in bare] == [flags] * 2
    both = [[word for word in call if word.endswith(":/data")] for call in bench.started]
    assert len({tuple(volumes) for volumes in both}) == 2, "each side has a volume of its own, the same each time"


def test_variants_are_started_cold_and_warm_on_a_volume_each(bench: Bench) -> None:
    done = bench.run("--variants", "default,eager", "--warm", "1")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "cold" in line]
    assert [line.partition(":")[0] for line in said] == ["default", "eager"]
    assert ["--enforce-eager" in call for call in bench.started] == [False, False, True, True]


@pytest.mark.parametrize("words", [("--pairs", "0"), ("--warm", "0"), ("--variants", "fast")])
def test_what_cannot_be_measured_is_refused(bench: Bench, words: tuple[str, ...]) -> None:
    done = bench.run(*words)
    assert done.returncode == 2
    assert words[0] in done.stderr or "no such variant" in done.stderr
