"""Words of the host command: why Docker does not answer, how far a download is, lines of a log."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import requests.exceptions
from docker.errors import DockerException
from rich.console import Console
from urllib3.exceptions import ProtocolError

from appliance.host.docker.daemon import explained
from appliance.host.docker.http import Gateway
from appliance.host.docker.log_lines import lines, sentence
from appliance.host.start.follow import Lines, duration, fetching


def wrapped(error: OSError) -> DockerException:
    """Wrap an error in the way that docker-py, requests and urllib3 do."""
    inner = requests.exceptions.ConnectionError(ProtocolError("Connection aborted.", error))
    outer = DockerException(f"Error while fetching server API version: {inner}")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "has_command", "said"),
    [
        (PermissionError(13, "Permission denied"), True, "this user may not use Docker: no permission for unix:///x"),
        (FileNotFoundError(2, "No such file"), False, "Docker is missing"),
        (FileNotFoundError(2, "No such file"), True, "Docker is stopped"),
        (ConnectionRefusedError(111, "refused"), True, "Docker is stopped"),
        (TimeoutError(110, "timed out"), True, "Docker returned an unexpected error"),
    ],
)
def test_why_docker_does_not_answer(error: OSError, has_command: bool, said: str) -> None:
    found = explained(wrapped(error), "unix:///x", has_command=has_command)
    assert found.message.startswith(said)
    assert found.exit_code == 10
    assert found.hint


def test_the_key_is_in_no_representation() -> None:
    gateway = Gateway(host="::1", port=1, key="sk-secret")
    assert "secret" not in repr(gateway)
    assert gateway.url == "http://[::1]:1/v1"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (4.84, "4.8 s"), (59, "59 s"), (97, "1 min 37 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, ""),
        ({"bytes_done": 0, "bytes_total": None}, "0.0 GB"),
        ({"bytes_done": 12e8, "bytes_total": 49e8, "bytes_per_s": None, "seconds_left": None}, "1.2 of 4.9 GB"),
        ({"bytes_done": 12e8, "bytes_total": 49e8, "bytes_per_s": 38e6, "seconds_left": 97},
         "1.2 of 4.9 GB, 38 MB/s, 1 min 37 s left"),
    ],
)  # fmt: skip
def test_how_far_a_download_is(document: dict[str, Any], words: str) -> None:
    assert fetching(document) == words


def test_into_a_log_each_sentence_goes_once_and_a_download_now_and_then() -> None:
    out, now = io.StringIO(), [0.0]
    shown = Lines(Console(file=out, width=200), clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        shown.show({"message": "fetching [x]", "bytes_done": second * 1e9, "bytes_total": 25e9})
    shown.show({"message": "loading"})
    shown.show({"message": "loading"})
    assert out.getvalue().splitlines() == [
        "fetching [x]: 0.0 of 25.0 GB", "fetching [x]: 10.0 of 25.0 GB", "fetching [x]: 20.0 of 25.0 GB", "loading",
    ]  # fmt: skip


def test_lines_that_docker_cut_anywhere() -> None:
    assert list(lines([b"on", b"e\ntw", "ö".encode()[:1], "ö".encode()[1:], b"\n\nrest"])) == ["one", "twö", "", "rest"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps({"time": "2026-11-22T16:49:38+00:00", "level": "info", "message": "m"}), "16:49:38 m"),
        (json.dumps({"time": "2026-11-22T16:49:38+00:00", "level": "error", "message": "m"}), "16:49:38 error: m"),
        ('{"other": 1}', '{"other": 1}'),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_an_event_as_a_sentence(line: str, words: str) -> None:
    assert sentence(line) == words
