from __future__ import annotations

import io
import json
import logging
from datetime import datetime
from pathlib import Path

import pytest

from appliance.console.progress import Phase
from appliance.console.report import Report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_sequences_of_a_name_never_reach_a_terminal() -> None:
    for form in ("text", "json"):
        stream = io.StringIO()
        Report(form, stream).warning("event_name", "loading \x1b[2J\x1b]0;title\x07.gguf\nnext line", name="\x1b[31m")
        assert "\x1b" not in stream.getvalue()
        assert "\x07" not in stream.getvalue()
        assert "next line" in stream.getvalue()


def test_without_a_terminal_each_event_is_one_line_of_json() -> None:
    stream = io.StringIO()
    report = Report("auto", stream)
    report.info("ready", "two\nlines", seconds=0.5, path=Path("/data"))
    report.warning("auth_off", "„off“")
    report.error("engine_died", "it died")
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(row["level"], row["event"], row["message"]) for row in rows] == [
        ("info", "ready", "two\nlines"),
        ("warning", "auth_off", "„off“"),
        ("error", "engine_died", "it died"),
    ]
    assert (rows[0]["seconds"], rows[0]["path"]) == (0.5, "/data")
    assert datetime.fromisoformat(rows[0]["time"]).utcoffset() is not None


@pytest.mark.parametrize("form", ["auto", "text"])
def test_on_a_terminal_it_is_text_and_nothing_is_taken_for_markup(form: str) -> None:
    stream = Terminal()
    Report(form, stream).warning("event_name", "a [bold]message[/bold] " + "x" * 200)
    assert "a [bold]message[/bold] " + "x" * 200 in stream.getvalue()
    assert "event_name" not in stream.getvalue()


def test_the_form_asked_for_wins_over_the_terminal() -> None:
    stream = Terminal()
    Report("json", stream).info("a", "b")
    assert json.loads(stream.getvalue())["event"] == "a"


def test_a_phase_keeps_its_beginning_while_it_lasts() -> None:
    report = Report("json", io.StringIO())
    report.phase(Phase.TUNING, "one")
    since = report.progress.since
    report.phase(Phase.TUNING, "two")
    assert (report.progress.since, report.progress.message) == (since, "two")
    report.phase(Phase.READY)
    assert report.progress.is_ready
    assert report.progress.since > since


def test_what_a_module_logs_is_an_event_like_any_other() -> None:
    stream, log = io.StringIO(), logging.getLogger("appliance.engines.vllm.startup.caches")
    with Report("json", stream).taking_logs():
        log.warning("removed %d files that a start left", 3)
        log.info("the first request was thrown away")
        log.debug("nothing")
    log.warning("the program is over")
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(row["level"], row["event"], row["message"]) for row in rows] == [
        ("warning", "log", "removed 3 files that a start left"),
        ("info", "log", "the first request was thrown away"),
    ]
