"""`python -m appliance serve` with several models, as users start it: loads on demand, unloads, failures and stops."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.process.stages.boot import Home, Serving, eventually, write_model

MESSAGES = [{"role": "user", "content": "hello there"}]
STRICT = """
models:
  a: {model: small.gguf}
  b: {model: second.gguf, alias: gpt-4}
  c: {model: third.gguf}
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A volume with three models, and no settings file."""
    home = Home.make(tmp_path / "home")
    for name in ("second", "third"):
        shutil.copy(home.data / "models/small.gguf", home.data / f"models/{name}.gguf")
    return home


@pytest.fixture
def strict(home: Home) -> Home:
    (home.data / "appliance.yaml").write_text(STRICT)
    return home


@contextmanager
def little_memory(home: Home, left_mib: float) -> Iterator[None]:
    """Leave so much host memory in the block: another container on the volume claims the rest."""
    folder = home.data / "cache/fleet"
    folder.mkdir(parents=True)
    claimed_mib = psutil.virtual_memory().available / 2**20 - left_mib
    with (folder / "other.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"unseen_mib": {"host": claimed_mib}}, file)
        file.flush()
        yield


def set_large(home: Home, *, pin: str = "off") -> None:
    """Two models that need about 2,500 MiB each, nearly all of it for a long context."""
    for name in ("small", "second"):
        (home.data / f"models/{name}.gguf").unlink()
        write_model(home.data / f"models/{name}.gguf", context=2**21)
    each = f"ctx_size: {2**21}, pin: {pin}"
    entries = f"models: {{a: {{model: small.gguf, {each}}}, b: {{model: second.gguf, {each}}}}}"
    (home.data / "appliance.yaml").write_text(entries)


def chat(front: Serving, name: str, **more: Any) -> tuple[int, Any]:
    return front.ask(
        "POST", "/v1/chat/completions", {"model": name, "messages": MESSAGES, **more}, key=front.home.key, timeout_s=100
    )


def post(front: Serving, path: str, name: str) -> tuple[int, Any]:
    return front.ask("POST", path, {"model": name}, key=front.home.key)


def rows(front: Serving) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in front.document("fleet")["models"]}


def loaded(front: Serving) -> set[str]:
    return {name for name, row in rows(front).items() if row["is_loaded"]}


def starts_of(home: Home, file: str) -> int:
    return sum(f"/{file} " in line for line in home.started)


def read_until(connection: socket.socket, mark: bytes) -> None:
    """Read a stream until the mark has come, and close the connection. Fails if it never comes."""
    with connection:
        seen = b""
        while mark not in seen:
            piece = connection.recv(65536)
            assert piece, seen[-500:]
            seen += piece


def is_loading(front: Serving, name: str) -> Callable[[], bool]:
    return lambda: bool(rows(front)[name]["is_loading"])


def test_a_hundred_simultaneous_first_requests_make_one_load(strict: Home) -> None:
    with strict.serving() as front, ThreadPoolExecutor(100) as threads:
        front.wait_ready()
        answers = list(threads.map(lambda _: chat(front, "b"), range(100)))
        assert {(status, answer.get("model")) for status, answer in answers} == {(200, "b")}
        assert starts_of(strict, "second.gguf") == 1
        assert loaded(front) == {"a", "b"}
        front.terminate()


def test_ten_clients_of_an_engine_that_dies_while_it_loads_are_told_and_the_others_go_on(strict: Home) -> None:
    strict.set_engine("--load-seconds", "0.5", "--die-before-ready", "1", where="second.gguf")
    with strict.serving() as front, ThreadPoolExecutor(10) as threads:
        front.wait_ready()
        answers = list(threads.map(lambda _: chat(front, "b"), range(10)))
        assert {(status, answer["error"]["code"]) for status, answer in answers} == {(503, "model_not_loaded")}
        assert chat(front, "a")[0] == 200
        assert front.ask("GET", "/health/ready")[0] == 200
        strict.set_engine()
        eventually(lambda: chat(front, "b")[0] == 200)
        front.terminate()


def test_an_unload_waits_for_the_answer_and_health_stays_ready(strict: Home, tmp_path: Path) -> None:
    strict.set_engine("--until", str(tmp_path / "end"), where="small.gguf")
    with strict.serving() as front:
        front.wait_ready()
        stream = front.stream(model="a")
        stream.recv(1)
        assert post(front, "/models/unload", "a") == (200, {"success": True, "model": "a"})
        time.sleep(0.3)
        assert rows(front)["a"]["answering"] == 1
        (tmp_path / "end").touch()
        read_until(stream, b"[DONE]")
        eventually(lambda: loaded(front) == set())
        eventually(lambda: front.engine_pids() == [])
        assert front.ask("GET", "/health/ready")[0] == 200
        assert front.document("status")["phase"] == "asleep"
        assert chat(front, "a", stream=True, max_tokens=1)[0] == 200
        front.terminate()


def test_keep_alive_nought_unloads_the_only_model_after_each_answer(home: Home) -> None:
    for name in ("second", "third"):
        (home.data / f"models/{name}.gguf").unlink()
    with home.serving() as front:
        front.wait_ready()
        for loads in (1, 2):
            assert chat(front, "anything", keep_alive=0, ttl=0)[0] == 200
            eventually(lambda: front.engine_pids() == [])
            assert rows(front)["small"]["loads"] == loads
            assert front.ask("GET", "/health/ready")[0] == 200
        assert front.ask("POST", "/appliance/v1/mode", {"mode": "speed"}, key=home.key)[0] == 409
        assert front.ask("POST", "/appliance/v1/tuning", key=home.key)[0] == 409
        assert chat(front, "small", keep_alive=[1])[0] == 400
        front.terminate()


def test_the_first_model_whose_file_is_gone_at_its_return_is_refused_alone(strict: Home) -> None:
    strict.set_engine("--die-before-ready", "1", where="gone.gguf")
    with strict.serving() as front:
        front.wait_ready()
        assert chat(front, "b")[0] == 200
        post(front, "/models/unload", "a")
        eventually(lambda: loaded(front) == {"b"})
        (strict.data / "models/small.gguf").unlink()
        strict.set_engine("--die-before-ready", "1", where="small.gguf")
        status, answer = chat(front, "a")
        assert (status, answer["error"]["code"]) in {(400, "model_not_loaded"), (503, "model_not_loaded")}
        assert chat(front, "b")[0] == 200
        assert front.ask("GET", "/health/ready")[0] == 200
        front.terminate()


def test_a_file_that_was_replaced_is_read_anew_and_one_that_is_gone_is_told(strict: Home) -> None:
    file = strict.data / "models/second.gguf"
    with strict.serving() as front:
        front.wait_ready()
        for context in (4096, 1024, 2048):
            if context != 4096:
                write_model(file.with_suffix(".new"), context=context)
                file.with_suffix(".new").rename(file)
            assert chat(front, "b")[0] == 200
            assert f"--ctx-size {context} " in strict.started[-1]
            assert front.ask("GET", "/appliance/v1/plan?model=b", key=strict.key)[1]["context"] == context
            post(front, "/models/unload", "b")
            eventually(lambda: "b" not in loaded(front))
        file.unlink()
        status, answer = chat(front, "b")
        assert (status, answer["error"]["code"]) == (400, "model_not_loaded")
        assert "second.gguf" in answer["error"]["message"]
        front.terminate()


def test_names(strict: Home) -> None:
    with strict.serving() as front:
        front.wait_ready()
        for name, found in (("gpt-4", "b"), ("B", "b"), ("second", "b")):
            assert chat(front, name)[1].get("model") in {found, name}, name
        assert chat(front, "nothing")[0] == 404
        assert chat(front, "")[0] == 400
        shutil.copy(strict.data / "models/small.gguf", strict.data / "models/gpt-4.gguf")
        time.sleep(2.5)
        front.ask("GET", "/v1/models", key=strict.key)
        for _ in range(2):
            assert chat(front, "gpt-4")[0] == 200
            assert starts_of(strict, "gpt-4.gguf") == 0  # the settings file says what it means
            assert chat(front, "GPT-4")[0] == 200
        assert chat(front, "gpt-4.gguf")[0] == 200
        assert starts_of(strict, "gpt-4.gguf") == 1
        assert chat(front, "gpt-4")[0] == 200  # now that the file's own names are known
        assert rows(front)["b"]["loads"] == 1
        front.terminate()


def test_files_that_come_and_go(home: Home) -> None:
    with home.serving(model="small.gguf") as front:
        front.wait_ready()
        assert chat(front, "unknown")[0] == 200  # of the first one
        shutil.copy(home.data / "models/small.gguf", home.data / "models/new.gguf")
        (home.data / "models/broken.gguf").write_bytes(b"GGUF" + bytes(100))
        (home.data / "models/loop.gguf").symlink_to("loop.gguf")
        for odd in (b"byte\xff.gguf", b"new\nline.gguf", b"<b>&\"'.gguf"):
            shutil.copy(os.fsencode(home.data / "models/small.gguf"), os.fsencode(home.data / "models/") + b"/" + odd)
        eventually(lambda: "new" in rows(front))
        assert rows(front).keys() - {"broken"} == {"small", "second", "third", "new", "<b>&\"'"}
        assert chat(front, "broken")[0] == 400
        for path in ("/metrics", "/v1/models", "/models", "/api/v0/models", "/api/tags", "/appliance/v1/fleet"):
            assert front.ask("GET", path, key=home.key)[0] == 200, path
        assert chat(front, "new")[0] == 200
        assert starts_of(home, "new.gguf") == 1
        (home.data / "models/second.gguf").unlink()
        status, answer = chat(front, "second")
        assert status in {400, 503}, answer
        assert chat(front, "small")[0] == 200
        shutil.move(home.data / "models", home.data / "elsewhere")
        time.sleep(6)  # longer than between two looks
        assert front.ask("GET", "/v1/models", key=home.key)[0] == 200
        assert chat(front, "small")[0] == 200
        front.terminate()


@pytest.mark.parametrize("state", ["loads", "is unloaded", "waits", "answers"])
def test_a_stop_ends_all_engines_in_time(strict: Home, tmp_path: Path, state: str) -> None:
    knobs = {
        "loads": ("--ignore-sigterm", "--load-until", str(tmp_path / "never")),
        "waits": ("--load-until", str(tmp_path / "never")),
        "is unloaded": ("--ignore-sigterm",),
        "answers": ("--ignore-sigterm", "--until", str(tmp_path / "never")),
    }[state]
    strict.set_engine(*knobs, where="second.gguf")
    with strict.serving(drain_s="3") as front, ThreadPoolExecutor(10) as threads:
        front.wait_ready()
        if state in ("loads", "waits"):
            names = ("b", "c") if state == "waits" else ("b",)
            asking = [threads.submit(chat, front, name) for name in names for _ in range(3)]
            eventually(is_loading(front, "b"))
            eventually(lambda: len(front.document("fleet")["waiting"]) == len(names))
        elif state == "answers":
            streams = [front.stream(model="b") for _ in range(2)]
            for stream in streams:
                stream.recv(1)
        else:
            assert chat(front, "b")[0] == 200
            post(front, "/models/unload", "b")
            eventually(lambda: not rows(front)["b"]["is_loaded"])
        seconds = front.terminate()
        assert seconds < 9
        if state in ("loads", "waits"):
            answers = [each.result(10) for each in asking]
            assert {(status, answer["error"]["code"]) for status, answer in answers} == {(503, "shutting_down")}
            assert seconds < 5
        if state == "answers":
            for stream in streams:
                read_until(stream, b"shutting_down")


def test_a_signal_while_the_first_of_several_loads(strict: Home, tmp_path: Path) -> None:
    strict.set_engine("--load-until", str(tmp_path / "never"))
    with strict.serving() as front:
        eventually(lambda: strict.started)
        front.process.send_signal(signal.SIGINT)
        assert front.wait_exit(timeout_s=20) == 0
        assert front.engine_pids() == []


def test_one_of_two_that_do_not_fit_together_makes_room_for_the_other_and_comes_back(home: Home) -> None:
    set_large(home)
    with little_memory(home, 3700), home.serving(receipts="always") as front:
        front.wait_ready()
        for name, other in (("b", "a"), ("a", "b"), ("b", "a")):
            status, answer = chat(front, name)
            assert status == 200
            receipt = answer["usage"]["appliance"]
            assert receipt["waited_for"] == f"{name} was loaded: nothing else is loaded"
            assert 0 < receipt["waited_s"] <= receipt["seconds"]
            receipt = chat(front, name)[1]["usage"]["appliance"]
            # Nothing is waited for, but on a busy machine some milliseconds are nobody's.
            assert receipt["waited_for"] is None
            assert receipt["waited_s"] < 1
            assert loaded(front) == {name}
            assert rows(front)[other]["sent_away_for"] == name
        assert len(front.engine_pids()) == 1
        assert front.document("fleet")["other_containers_mib"]["host"] > 0
        front.terminate()


def test_who_answers_is_waited_for_and_a_stream_is_told_why(home: Home, tmp_path: Path) -> None:
    set_large(home)
    home.set_engine("--until", str(tmp_path / "end"), where="small.gguf")
    with little_memory(home, 3700), home.serving(load_wait_s="1") as front:
        front.wait_ready()
        first = front.stream(model="a")
        first.recv(1)
        second = front.stream(model="b")
        status, answer = chat(front, "b")
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        assert "when an answer has ended: a" in answer["error"]["message"]
        (tmp_path / "end").touch()
        read_until(first, b"[DONE]")
        read_until(second, b"[DONE]")
        assert loaded(front) == {"b"}
        front.terminate()


def test_two_that_are_pinned_and_do_not_fit_together_end_the_start_with_the_figures(home: Home) -> None:
    set_large(home, pin="on")
    with little_memory(home, 3700), home.serving() as front:
        assert front.wait_exit(timeout_s=60) == 10, front.text
        assert "pinned models do not fit together: " in front.text
        assert home.started == []


def test_a_plain_named_key_uses_models_and_moves_none_by_itself(strict: Home) -> None:
    plain, admin = (strict.command("keys", "add", *words).stdout.strip() for words in (("eve",), ("bob", "--admin")))
    with strict.serving() as front:
        front.wait_ready()
        for path in ("/models/load", "/models/unload"):
            status, answer = front.ask("POST", path, {"model": "b"}, key=plain)
            assert (status, answer["error"]["code"]) == (403, "key_not_allowed")
            assert front.ask("POST", path, {"model": "b"}, key=admin)[0] == 200
        assert front.ask("GET", "/appliance/v1/fleet", key=plain)[0] == 403
        assert front.ask("POST", "/v1/chat/completions", {"model": "c", "messages": MESSAGES}, key=plain)[0] == 200
        assert front.ask("GET", "/models/c", key=plain)[0] == 200
        front.terminate()


def test_a_profile_says_beside_which_pinned_models_it_was_measured(home: Home) -> None:
    entries = "models: {a: {model: small.gguf}, b: {model: second.gguf, pin: on}}"
    (home.data / "appliance.yaml").write_text(entries)
    with home.serving(tune="idle", idle_s="3600", budget_s="5") as front:
        front.wait_ready()
        eventually(lambda: loaded(front) == {"a", "b"})
        front.measure_now()
        front.event("tuned")
        eventually(lambda: front.document("profile").get("notes"))
        assert "measured beside b" in front.document("profile")["notes"]
        front.terminate()
