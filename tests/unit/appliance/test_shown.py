"""No control sequence of others' text reaches a terminal raw, whatever message it is in."""

from __future__ import annotations

import ast
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from appliance.console.report import Report
from appliance.console.shown import beneath, quoted, shown, shown_streams
from appliance.console.terminal import Terminal

ROOT = Path(__file__).parents[3]
NAME = "\x1b[31mX\x9b2J\x07\u202eY"
AS_WORDS = r"\x1b[31mX\x9b2J\x07\u202eY"


@pytest.mark.parametrize("text", ["日本語\u3000x\u200d\u00a0\t2\n", "a\\x1b"])
def test_text_stays_as_it_is(text: str) -> None:
    assert shown(text) == text


def test_streams_show_it_as_words_until_they_are_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    out = sys.stdout
    with shown_streams(), shown_streams():
        print(NAME)
        sys.stderr.writelines([NAME, "\udcff"])
        beneath(sys.stdout).write("\x1b[K")
        assert (sys.stdout.isatty(), json.loads(json.dumps(NAME))) == (out.isatty(), NAME)
    assert sys.stdout is out
    assert capsys.readouterr() == (f"{AS_WORDS}\n\x1b[K", rf"{AS_WORDS}\udcff")


def test_a_terminal_has_its_own_styles_and_no_others() -> None:
    to = io.StringIO()
    console = Terminal(file=to, force_terminal=True, color_system="standard", width=80, highlight=False)
    table = Table("name")
    table.add_row(Text("\x1b[31mX", "red"))
    console.print(table)
    console.print(NAME, markup=False)
    told = to.getvalue()
    assert "\x1b[31m" + r"\x1b[" in told  # ours, and what is shown of the other
    assert told.endswith(AS_WORDS.replace(r"\x07", "") + "\n")  # which rich drops itself
    assert told.count("\x1b[31m") == 1


def test_what_moves_keeps_its_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_streams():
        console = Terminal(stderr=True, force_terminal=True, width=80)
        with Live(Text("\x1b[31mX"), console=console, auto_refresh=False) as live:
            live.refresh()
    told = capsys.readouterr().err
    assert "\x1b[2K" in told
    assert r"\x1b[31mX" in told
    assert r"\x1b[2K" not in told
    assert "\x1b[31m" not in told


def test_a_start_says_it_as_words() -> None:
    to = io.StringIO()
    Report("text", to).info("held", f"held by {NAME}")
    assert AS_WORDS.replace(r"\x07", "") in to.getvalue()
    assert "\x1b[31m" not in to.getvalue()


def test_pages_get_the_code_of_a_problem_and_what_to_do() -> None:
    report = Report("json", io.StringIO())
    report.error("engine_died", "engine was killed", exit_code=45, hint="see its log", log=["a", "b"])
    report.warning("auth_off", "authentication is off", hint=None)
    died, other = report.recent
    assert (died["exit_code"], died["hint"]) == (45, "see its log")
    assert "log" not in died
    assert other.keys() == {"time", "level", "event", "message"}


@pytest.mark.parametrize("word", ["a b", "it's", f"/data/{NAME}'\\n\udcff.gguf"])
def test_bash_takes_a_quoted_word_as_it_was(word: str) -> None:
    assert shown(quoted(word)) == quoted(word)
    if word.isprintable():
        assert shlex.split(quoted(word)) == [word]
    else:
        said = subprocess.run(["bash", "-c", f"printf %s {quoted(word)}"], capture_output=True, check=True).stdout
        assert os.fsdecode(said) == word


@pytest.mark.thorough
def test_no_console_of_rich_is_made_elsewhere() -> None:
    for path in (ROOT / "appliance").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
            assert not is_made, f"{path}: use appliance.console.terminal.Terminal"
