"""The abilities of a model, as a start checks them in idle time: with a fake engine, whose answers a test decides."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.abilities.rows import ROWS
from appliance.image_facts import dump_facts, parse_engine_facts
from tests.process.stages.boot import Home, Serving, eventually
from tests.process.stages.real import listed
from tests.process.stages.vllm_home import VllmHome

TEMPLATES = Path(__file__).parents[1] / "data/templates"
NAMES = [row.name for row in ROWS]
SECRET = "xylophone"  # a word of the model, which no log may have
QUICK = {"tune": "first", "idle_s": "1"}


def with_template(home: Home, template: str = "qwen3") -> dict[str, str]:
    """Return settings for a chat template; the engine's facts get the flags for it."""
    path = home.folder / "facts/engine_facts.json"
    facts = parse_engine_facts(path.read_text())
    path.write_text(dump_facts(replace(facts, flags=tuple({*facts.flags, "--chat-template-file"}))))
    return {**QUICK, "chat_template_file": str(TEMPLATES / f"{template}.jinja")}


def says(home: Home, arguments: str) -> None:
    """Let the fake engine answer every chat with one call of `get_weather`."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    delta = {"tool_calls": [{"index": 0, **call}]}
    path = home.folder / "says.json"
    path.write_text(
        json.dumps(
            {
                "whole": {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]},
                "events": [
                    {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]},
                    {"choices": [{"index": 0, "finish_reason": "tool_calls", "delta": {}}]},
                ],
            }
        )
    )
    home.set_engine("--says", str(path))


def rows(serving: Serving) -> dict[str, dict[str, Any]]:
    found = serving.document("status")["abilities"]
    return {row["name"]: row for row in found["rows"]} if found else {}


def all_rows(serving: Serving) -> dict[str, dict[str, Any]]:
    return eventually(  # type: ignore[no-any-return]
        lambda: found if (found := rows(serving)).keys() == {*NAMES} else None, what=lambda: serving.text
    )


def ledger(serving: Serving) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(serving.runtime_dir / f"appliance-{serving.process.pid}.sock"))
        connection.sendall(b"GET /fake/requests HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    found: dict[str, Any] = json.loads(received.partition(b"\r\n\r\n")[2])
    return found


def chats(serving: Serving) -> int:
    return serving.engine_requests().get("POST /v1/chat/completions", 0)


@pytest.fixture
def home(tuned: Home, tmp_path: Path) -> Home:
    return tuned.copy(tmp_path / "home")


def test_a_broken_call_fails_and_is_told_without_its_text(home: Home) -> None:
    says(home, json.dumps({"city": SECRET, "days": 1})[:-1])
    settings = with_template(home)
    with home.serving(**settings) as serving:
        serving.wait_ready()
        found = all_rows(serving)
        serving.event("abilities")  # the last row is on the volume
        assert {name for name in NAMES if found[name]["result"] == "failed"} >= {
            "tool_free",
            "tool_forced",
            "tool_nested",
            "tool_special",
            "structured",
        }
        forced = found["tool_forced"]
        assert (forced["whole"], forced["streamed"]) == ("failed", "failed")
        assert forced["reason"] == "the call's arguments are no JSON"
        assert forced["then"].startswith("send the tool's schema as response_format")
        assert listed(serving)["abilities"] == {name: found[name]["result"] for name in NAMES}
        warned = {event["ability"] for event in serving.events if event["event"] == "ability_failed"}
        assert warned == {name for name in NAMES if found[name]["result"] == "failed"}
        assert SECRET not in serving.text
    plan = home.command("plan", beside=None, **settings).stdout
    assert "tool_forced: failed (the call's arguments are no JSON)" in plan
    document = json.loads(home.command("plan", "--json", beside=None, **settings).stdout)
    assert [row["name"] for row in document["abilities"]["rows"]] == NAMES


def test_a_valid_call_passes_where_it_was_asked_for(home: Home) -> None:
    says(home, '{"city": "Paris", "days": 2}')
    with home.serving(**with_template(home)) as serving:
        serving.wait_ready()
        found = {name: row["result"] for name, row in all_rows(serving).items()}
    assert (found["tool_free"], found["tool_forced"]) == ("passed", "passed")
    assert found["tool_parallel"] == "not judged"  # one call, which the model may choose
    assert found["tool_named"] == found["tool_special"] == found["tool_nested"] == "failed"  # the wrong tool


def test_what_a_template_lacks_is_not_offered_and_results_survive_a_restart(home: Home) -> None:
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        first = all_rows(serving)
        assert chats(serving) == 2  # `structured`, whole and streamed
        assert {first[name]["result"] for name in NAMES if name != "structured"} == {"not offered"}
        assert first["tool_free"]["reason"] == "the chat template has no tools"
        assert first["structured"]["result"] == "failed"  # the fake repeats the question
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        assert all_rows(serving) == first
        serving.event("profile_probed")  # the next thing that is done in idle time
        assert chats(serving) == 0
    with home.serving(**with_template(home)) as serving:  # another template: all again
        serving.wait_ready()
        assert all_rows(serving)["tool_free"]["result"] == "not judged"
        assert chats(serving) > 2
    (path,) = home.profiles.glob("*.abilities")
    assert home.command("profiles", "forget", path.stem).returncode == 0
    assert not path.exists()


@pytest.mark.parametrize("setting", [{"check_abilities": "off"}, {"tune": "off"}])
def test_a_setting_turns_it_off(home: Home, setting: dict[str, str]) -> None:
    with home.serving(**{**QUICK, **setting}) as serving:
        serving.wait_ready()
        serving.event("profile_probed")
        assert serving.document("status")["abilities"] is None
        assert "abilities" not in listed(serving)
        assert chats(serving) == 0


def test_a_request_ends_a_row_which_is_asked_again(home: Home) -> None:
    home.set_engine("--works-s", "3", "--sleeps")
    with home.serving(**with_template(home)) as serving:
        serving.wait_ready()
        eventually(lambda: chats(serving) == 1, what=lambda: serving.text)
        status, _ = serving.chat()
        assert status == 200
        assert ledger(serving)["disconnects"] == 1
        eventually(lambda: chats(serving) >= 3, what=lambda: serving.text)
        first, _, again = [each for each in ledger(serving)["requests"] if each["path"] == "/v1/chat/completions"][:3]
        assert first["body"] == again["body"]


def test_an_engine_that_dies_of_a_row_is_asked_no_third_time(home: Home) -> None:
    home.set_engine("--die-on-request")
    with home.serving(**with_template(home)) as serving:
        serving.wait_ready()
        told = serving.event("abilities")
        assert told["message"].startswith("2 failed: tool_free, tool_forced; ")
        assert set(rows(serving)) == {"tool_free", "tool_forced"}
        assert rows(serving)["tool_free"]["reason"] == "the engine ended while it answered"
        assert serving.document("status")["engine_restarts"] == 2


def test_a_damaged_file_is_replaced(home: Home) -> None:
    (profile,) = home.profiles.glob("*.json")
    path = profile.with_suffix(".abilities")
    path.write_text('{"of": 1}')
    with home.serving(**QUICK) as serving:
        serving.wait_ready()
        assert "cannot be read, not used" in serving.event("abilities")["message"]
        all_rows(serving)
    assert json.loads(path.read_text())["of"]


def test_the_other_engine(tmp_path: Path) -> None:
    """It refuses every model's name but its own, and gives reasoning another name."""
    home = VllmHome.make(tmp_path / "home")
    home.set_engine("--fake-interval", "0")
    template = str(TEMPLATES / "qwen3.jinja")
    with home.serving(**{**QUICK, "tune": "idle", "budget_s": "5"}, chat_template_file=template) as serving:
        serving.wait_ready()
        found = all_rows(serving)
    assert not [row for row in found.values() if "refused" in row["reason"]]
    assert found["tool_forced"]["result"] == found["structured"]["result"] == "failed"
    assert found["tool_free"]["result"] == found["reasoning"]["result"] == "not judged"
