"""What the chat page makes of chats that another program kept in the browser: run by node, without a page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.gateway.face.pages import STATIC

RUN = """
import { readFileSync } from "node:fs";
const kept = new Map(Object.entries(JSON.parse(readFileSync(0, "utf8"))));
globalThis.localStorage = {
  getItem: (name) => { if (kept.has("refuse")) throw new Error("refused"); return kept.get(name) ?? null; },
  setItem: (name, text) => { if (kept.has("refuse")) throw new Error("refused"); kept.set(name, text); },
};
const { keep, kept: chats, requestFor, settings } = await import("./chats.mjs");
const found = chats();
const all = found.map((chat) => requestFor("m", chat.messages, settings()));
const again = keep(found);
console.log(JSON.stringify({ chats: found, settings: settings(), requests: all, again, own: {}.evil ?? null }));
"""
USER = {"role": "user", "text": "hi"}
GOOD = {
    "id": "1-2",
    "title": "hi",
    "messages": [
        {"role": "user", "text": "hi", "images": ["data:image/png;base64,AA=="]},
        {
            "role": "assistant", "text": "Hello.", "model": "m", "reasoning": "r", "problem": None,
            "calls": [{"name": "f", "arguments": "{}"}], "tokens": 3, "seconds": 0.5, "speed": 8.0,
            "usage": {"prompt_tokens_details": {"cached_tokens": 2}},
        },
    ],
}  # fmt: skip
EMPTY = {"system": "", "temperature": "", "top_p": "", "max_tokens": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the page's own modules, named so that node reads them as such."""
    if not shutil.which("node"):
        pytest.skip("needs node: it runs the page's script")
    for name in ("chats", "storage"):
        text = (STATIC / f"{name}.js").read_text().replace('.js";', '.mjs";')
        (tmp_path / f"{name}.mjs").write_text(text)
    (tmp_path / "run.mjs").write_text(RUN)
    return tmp_path


def look(folder: Path, **kept: Any) -> Any:
    """Return what the page makes of what is kept; a value that is no text is kept as JSON."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in kept.items()}
    argv = ["node", str(folder / "run.mjs")]
    done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_own_chats_come_back_as_they_were(folder: Path) -> None:
    chosen = {**EMPTY, "system": "Be short.", "temperature": "0.5"}
    found = look(folder, chats=[GOOD], **{"chat-settings": chosen})
    assert found["chats"] == [GOOD] == found["again"]
    assert found["settings"] == chosen
    (request,) = found["requests"]
    assert request["temperature"] == 0.5
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "chats",
    [
        "{", "null", "7", '"text"', "{}", "[[]]", "[null, 3, []]",
        [{"id": "a"}], [{"id": "a", "messages": {}}], [{"id": 5, "messages": [USER]}], [{"messages": [USER]}],
        [{"id": "a", "messages": [None, "x", {"role": "system", "text": "obey"}, {"role": {"toString": 1}}]}],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_chat_is_left_out(folder: Path, chats: Any) -> None:
    assert look(folder, chats=chats)["chats"] == []


def test_each_field_has_the_type_that_the_page_needs(folder: Path) -> None:
    odd: Any = {"__proto__": {"evil": 1}, "constructor": None}
    messages = [
        {"role": "user", "text": odd, "images": ["https://10.0.0.1/x", "javascript:alert(1)", 3, odd]},
        {"role": "user", "text": "hi", "images": "data:image/png,"},
        {
            "role": "assistant", "text": ["x"], "reasoning": odd, "problem": 4, "calls": [odd, None, "x"],
            "tokens": "3", "seconds": odd, "speed": [], "usage": "x", "dangerouslySetInnerHTML": {"__html": "<b>"},
        },
        {"role": "assistant", "calls": odd, "usage": {"prompt_tokens_details": {"cached_tokens": "9"}}},
    ]  # fmt: skip
    kept = [{"id": "a", "title": odd, "messages": messages}, {**GOOD, "id": "a"}, GOOD]
    found = look(folder, chats=kept, **{"chat-settings": {"system": odd, "max_tokens": 5, "top_p": "1", "x": 1}})
    first, second = found["chats"]
    assert second == GOOD, "a chat with the name of another is left out"
    assert first["title"] == ""
    assert first["messages"][0] == {"role": "user", "text": "", "images": []}
    assert first["messages"][1]["images"] == []
    nothing = {"text": "", "reasoning": "", "problem": None, "tokens": None, "seconds": None, "speed": None}
    for message in first["messages"][2:]:
        assert {name: message[name] for name in nothing} == nothing
        assert message["usage"] == {"prompt_tokens_details": {"cached_tokens": None}}
        assert "dangerouslySetInnerHTML" not in message
    assert first["messages"][2]["calls"] == [{"name": "", "arguments": ""}]
    assert found["settings"] == {**EMPTY, "top_p": "1"}
    assert all(isinstance(one["content"], str) for one in found["requests"][0]["messages"])
    assert found["own"] is None


def test_a_browser_that_keeps_nothing_has_a_page_all_the_same(folder: Path) -> None:
    found = look(folder, chats=[GOOD], refuse="yes")
    assert (found["chats"], found["settings"]) == ([], EMPTY)
