"""The whole appliance while clients take all connections that they get, and while it has no open files left itself."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from appliance.system.open_files import LEAST, SPARE
from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.flood import flooded

LACK = "the container lacks open files, memory or processes"
KEPT = 3 + SPARE  # after standard input, output and error
NARROW = {"ubatch": "512", "load_mode": "mmap", "kv_type": "f16", "speculation": "off"}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


def warnings(serving: Serving) -> list[str]:
    return [event["message"] for event in serving.events if event["level"] != "info"]


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names are enough


def answers(serving: Serving) -> None:
    assert serving.ask("GET", "/health/live")[0] == 200
    assert serving.chat()[0] == 200


@pytest.mark.parametrize(
    ("limits", "crowd"),
    [((LEAST, LEAST), 150), ((256, 256), 300), ((1024, 1024), 1100), ((1024, 20_000), 2200)],
    ids=str,
)
def test_a_crowd_without_a_key_ends_nothing(home: Home, tmp_path: Path, limits: tuple[int, int], crowd: int) -> None:
    """The crowd is there while the engine loads, while it serves, after it was killed, and while another is
    measured."""
    loaded = tmp_path / "loaded"
    home.set_engine("--load-until", str(loaded))
    home.open_files = limits
    with home.serving(tune="idle", idle_s="1", **NARROW) as serving:
        serving.event("listening")
        with flooded(serving.port, crowd):
            assert serving.ask("GET", "/health/live")[0] == 200
            assert serving.ask("GET", "/health/ready")[0] == 503
            loaded.touch()
            serving.wait_ready()
            assert resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE) == (limits[1], limits[1])
            answers(serving)
            (pid, *_) = serving.engine_pids()
            os.kill(pid, signal.SIGKILL)
            serving.event("engine_died")
            eventually(lambda: serving.names().count("ready") == 2, what=lambda: serving.text)
            answers(serving)
            serving.event("tune_step")
            answers(serving)
            assert open_files(serving.process.pid) < limits[1] - 32
        said = warnings(serving)
        assert len(said) == len(set(said)), "each once"
        assert sum("the most that fit" in words for words in said) >= 1
        assert not any(LACK in words for words in said)
        answers(serving)
        serving.terminate()


@contextmanager
def without_files(serving: Serving) -> Iterator[None]:
    """Let the appliance open nothing more in the block; what is open stays. The limit is on the numbers of descriptors,
    and the lowest ones stay for its end."""
    pid = serving.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (KEPT, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was stopped
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def lacks(serving: Serving) -> list[str]:
    return [words for words in warnings(serving) if LACK in words]


@pytest.mark.parametrize("event", ["listening", "engine_start"])
def test_a_start_goes_on_when_there_are_files_again(home: Home, tmp_path: Path, event: str) -> None:
    """Files are lacking while the start chooses what to serve, or while the engine loads."""
    loaded = tmp_path / "loaded"
    home.set_engine("--load-until", str(loaded))
    with home.serving() as serving:
        serving.event(event)
        with without_files(serving):
            eventually(lambda: lacks(serving))
            loaded.touch()
        serving.wait_ready()
        assert serving.chat()[0] == 200
        assert len(lacks(serving)) == 1
        serving.terminate()


def test_a_killed_engine_is_back_when_there_are_files_again(home: Home) -> None:
    """The request meanwhile is told what is lacking, and not that the engine is at fault."""
    with home.serving() as serving:
        serving.wait_ready()
        kept = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        kept.request("GET", "/health/live")
        assert kept.getresponse().read()
        (pid,) = serving.engine_pids()
        with without_files(serving):
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
            kept.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {home.key}"})
            refused = kept.getresponse()
            assert (refused.status, refused.headers["retry-after"]) == (503, "2")
            assert json.loads(refused.read())["error"]["code"] == "out_of_resources"
            os.kill(pid, signal.SIGKILL)
            serving.event("engine_died")
            kept.request("GET", "/health/live")
            assert kept.getresponse().read() == b'{"status":"live"}'
        kept.close()
        eventually(lambda: serving.names().count("ready") == 2, what=lambda: serving.text)
        assert serving.chat()[0] == 200
        assert len(lacks(serving)) == 1
        serving.terminate()


def test_measuring_goes_on_when_there_are_files_again(home: Home, tmp_path: Path) -> None:
    """Measuring's imports, probes and engines all fail meanwhile."""
    with home.serving(tune="idle", idle_s="1", **NARROW) as serving:
        serving.wait_ready()
        with without_files(serving):
            eventually(lambda: lacks(serving))
            assert serving.process.poll() is None
        serving.event("tuned")
        assert serving.chat()[0] == 200
        assert len(lacks(serving)) == 1
        serving.terminate()


def test_a_stop_ends_where_there_are_no_files(home: Home) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        with without_files(serving):
            serving.terminate()


@pytest.mark.parametrize("verb", ["serve", "plan", "doctor", "tune"])
def test_too_few_to_start_with_are_refused(home: Home, verb: str) -> None:
    home.open_files = (16, 16)
    done = home.command(verb)
    assert done.returncode == 10
    assert done.stderr == (
        "error: the limit of open files is too low: 16 (RLIMIT_NOFILE); 128 are needed\n"
        "\nhint: start the container with --ulimit nofile=1024:65536, or without --ulimit\n"
    )
