"""Clients without a key that take every connection, and a container that lacks open files or processes."""

from __future__ import annotations

import subprocess

import docker.types
import pytest
import requests

from appliance.system.open_files import LEAST
from tests.container.stages.containers import Stage, ended, started, volume, wait_for
from tests.process.stages.flood import flooded

LACK = "the container lacks open files, memory or processes"
CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}


def limit(soft: int, hard: int) -> docker.types.Ulimit:
    return docker.types.Ulimit(name="nofile", soft=soft, hard=hard)


def port(stage: Stage) -> int:
    return int(stage.base.rpartition(":")[2])


def answers(stage: Stage) -> None:
    assert stage.get("/health/live").status_code == 200
    reply = requests.post(f"{stage.base}/v1/chat/completions", json=CHAT, headers=stage.authorized(), timeout=60)
    assert reply.status_code == 200, reply.text


def kill_engine(stage: Stage) -> None:
    before = stage.names().count("ready")
    stage.run("python3", "-c", KILL)
    wait_for(lambda: stage.names().count("ready") > before, 60, stage.logs)


BESIDE_ENGINE = """
import os, pathlib
asking, pid = set(), str(os.getpid())  # this program, and the shells that run it
while pid != "0":
    asking.add(pid)
    pid = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
tasks = [path for path in pathlib.Path("/proc").glob("[0-9]*/task/*/comm") if path.parts[2] not in asking]
engines = [path.parts[2] for path in pathlib.Path("/proc").glob("[0-9]*/comm") if path.read_text() == "llama-server\\n"]
print(sum(path.parts[2] not in engines for path in tasks))
"""
KILL = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if path.read_text().strip() == "llama-server":
        os.kill(int(path.parent.name), signal.SIGKILL)
"""


@pytest.mark.parametrize(("soft", "hard", "crowd"), [(256, 256, 300), (1024, 1024, 1100), (1024, 20_000, 2200)])
def test_a_crowd_without_a_key_ends_nothing(soft: int, hard: int, crowd: int) -> None:
    """From the first moment that the port is open, through a restart of the engine, beside idle measuring."""
    env = {"APPLIANCE_TUNE": "idle", "APPLIANCE_THREADS": "1"}  # two would wait for each other on a busy machine
    with volume() as name, started(name, env=env, ulimits=[limit(soft, hard)]) as stage:
        wait_for(lambda: "listening" in stage.names(), 60, stage.logs)
        with flooded(port(stage), crowd):
            assert stage.get("/health/live").status_code == 200
            stage.wait_ready()
            answers(stage)
            wait_for(lambda: {"bandwidth_measure", "idle_measure"} & {*stage.names()}, 60, stage.logs)
            kill_engine(stage)
            answers(stage)
        stage.container.reload()
        assert (stage.container.status, stage.container.attrs["RestartCount"]) == ("running", 0)
        full = [event["message"] for event in stage.events() if "the most that fit" in str(event["message"])]
        assert full
        assert len(full) == len(set(full)), "each once"


def test_an_engine_that_cannot_be_started_for_want_of_processes_is_started_later() -> None:
    """EAGAIN at fork: Docker's limit of processes is lowered to what there are beside the engine, and raised again."""
    with volume() as name, started(name, env={"APPLIANCE_THREADS": "1"}) as stage:
        stage.wait_ready()
        beside = int(stage.run("python3", "-c", BESIDE_ENGINE))
        stage.container.exec_run(["sh", "-c", 'sleep 6; exec python3 -c "$0"', KILL], detach=True)
        set_most_processes(stage, beside)
        wait_for(lambda: LACK in stage.logs(), 60, stage.logs)
        stage.container.reload()
        assert stage.container.status == "running"
        set_most_processes(stage, -1)
        wait_for(lambda: stage.names().count("ready") == 2, 60, stage.logs)
        answers(stage)
        assert stage.logs().count(LACK) == 1


def set_most_processes(stage: Stage, number: int) -> None:
    subprocess.run(["docker", "update", "--pids-limit", str(number), str(stage.container.id)], check=True, timeout=60)


def test_too_few_open_files_are_refused() -> None:
    code, words = ended(None, "serve", ulimits=[limit(16, 16)])
    assert code == 10
    assert f"the limit of open files is too low: 16 (RLIMIT_NOFILE); {LEAST} are needed" in words
    assert "Traceback" not in words
