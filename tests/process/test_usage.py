"""What was used with each key, of a running appliance: counted once, kept over restarts, and never in the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.gateway import read_until

CHAT: Any = {"model": "small", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 5}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


def usage(serving: Serving, query: str = "") -> Any:
    return serving.document(f"usage{query}")


def total(serving: Serving) -> int:
    requests: int = usage(serving)["total"]["requests"]
    return requests


def on_volume(home: Home) -> Any:
    done = home.command("usage", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_counted_by_key_and_model(home: Home) -> None:
    key = home.command("keys", "add", "ci").stdout.strip()
    with home.serving() as serving:
        serving.wait_ready()
        assert usage(serving)["rows"] == []
        for _ in range(2):
            assert serving.ask("POST", "/v1/chat/completions", CHAT, key=key)[0] == 200
        assert serving.chat()[0] == 200
        assert serving.ask("GET", "/v1/models", key=key)[0] == 200
        stream = serving.stream()
        read_until(stream, b"[DONE]")
        stream.close()
        eventually(lambda: total(serving) == 4)
        rows = {row["key"]: row for row in usage(serving, "?by=key")["rows"]}
        assert {name: row["requests"] for name, row in rows.items()} == {"ci": 2, "": 2}
        assert rows["ci"]["tokens_in"] > 0 < rows["ci"]["tokens_out"]
        (row,) = usage(serving, "?by=model&days=1")["rows"]
        assert (row["model"], row["requests"], row["errors"]) == ("small", 4, 0)
        assert len(usage(serving)["rows"]) == 2, "by day, key and model"
        for query in ("days=0", "days=401", "days=x", "days=", "days=-1", "by=hour", "by=", "by=%1b%5b2J"):
            status, answer = serving.ask("GET", f"/appliance/v1/usage?{query}", key=home.key)
            assert (status, answer["error"]["code"]) == (400, "invalid_request"), query
            assert "\x1b" not in answer["error"]["message"]
        assert serving.ask("GET", "/appliance/v1/usage")[0] == 401
        assert serving.ask("GET", "/appliance/v1/usage", key=key)[0] == 403
        assert serving.ask("POST", "/appliance/v1/usage", {}, key=home.key)[0] == 405
        serving.terminate()
    assert on_volume(home)["total"]["requests"] == 4, "the end wrote the rest"
    shown = home.command("usage", "--by", "key").stdout
    assert "ci                2" in shown
    assert "(own key)         2" in shown
    with home.serving() as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        eventually(lambda: total(serving) == 5)


def test_a_kill_loses_seconds_at_most(home: Home) -> None:
    with home.serving() as serving:
        serving.wait_ready()
        for _ in range(3):
            assert serving.chat()[0] == 200
        eventually(lambda: on_volume(home)["total"]["requests"] == 3, timeout_s=30)
        serving.process.send_signal(signal.SIGKILL)
        serving.wait_exit()
    assert on_volume(home)["total"]["requests"] == 3


def test_two_containers_add_to_one_file(home: Home) -> None:
    with home.serving() as one, home.serving() as two:
        one.wait_ready()
        two.wait_ready()
        for serving in (one, two, one):
            assert serving.chat()[0] == 200
        eventually(lambda: total(one) == 3 == total(two), timeout_s=30)
        one.terminate()
        two.terminate()
    assert on_volume(home)["total"]["requests"] == 3


def test_a_file_that_cannot_be_written_ends_nothing(home: Home) -> None:
    path = home.data / "usage.sqlite3"
    os.mkfifo(path)
    done = home.command("usage")
    assert (done.returncode, f"error: file of the use cannot be used: {path}" in done.stderr) == (50, True)
    with home.serving() as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200
        problem = eventually(lambda: usage(serving)["problem"])
        assert str(path) in problem
        assert total(serving) == 1
        assert serving.chat()[0] == 200
        serving.terminate()
    assert serving.text.count("stays in memory until the volume takes it") == 1


def test_the_verb_refuses_what_it_cannot_show(home: Home) -> None:
    assert home.command("usage").stdout.startswith("nothing was used since ")
    for words, says in (
        (("--days", "0"), "not a number from 1 to 400: 0"),
        (("--days", "many"), "not a number from 1 to 400: many"),
        (("--by", "hour"), "invalid choice: 'hour'"),
    ):
        done = home.command("usage", *words)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
