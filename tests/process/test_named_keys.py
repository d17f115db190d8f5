"""Named keys of a running appliance: who may do what, limits, and changes without a restart."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.process.stages.boot import Home, Serving, eventually

CHAT: Any = {"model": "small", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 5}
OWN_PATHS = (
    ("GET", "/appliance/v1/status"),
    ("GET", "/appliance/v1/events"),
    ("GET", "/metrics"),
    ("POST", "/appliance/v1/mode"),
    ("POST", "/appliance/v1/tuning"),
    ("GET", "/appliance/v1/unknown"),
    ("DELETE", "/v1/unknown"),
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    home = Home.make(tmp_path_factory.mktemp("keys") / "home")
    with home.serving() as serving:
        serving.wait_ready()
        yield serving
        serving.terminate()


def add(home: Home, name: str, *words: str) -> str:
    done = home.command("keys", "add", name, *words)
    assert done.returncode == 0, done.stderr
    assert "shown this once" in done.stderr
    assert done.stdout.strip() not in done.stderr
    return done.stdout.strip()


def code_of(serving: Serving, key: str, method: str = "POST", path: str = "/v1/chat/completions") -> tuple[int, str]:
    status, answer = serving.ask(method, path, CHAT if method == "POST" else None, key=key)
    return status, answer["error"]["code"] if "error" in answer else ""


def wait_for(serving: Serving, key: str, status: int) -> None:
    eventually(lambda: code_of(serving, key, "GET", "/v1/models")[0] == status, timeout_s=30)


def added(serving: Serving, name: str, *words: str) -> str:
    """Add a key and wait until the gateway knows it."""
    key = add(serving.home, name, *words)
    wait_for(serving, key, 200)
    return key


def test_a_named_key_may_use_the_model_and_nothing_else(serving: Serving) -> None:
    key = added(serving, "plain")
    assert code_of(serving, key) == (200, "")
    for path in ("/v1/models", "/v1/models/small", "/models", "/api/v0/models", "/health/ready"):
        assert serving.ask("GET", path, key=key)[0] == 200, path
    for method, path in OWN_PATHS:
        assert code_of(serving, key, method, path) == (403, "key_not_allowed"), path
    for method, path in OWN_PATHS[:3]:
        assert serving.home.key
        assert path == "/appliance/v1/events" or serving.ask(method, path, key=serving.home.key)[0] == 200
    assert code_of(serving, "sk-unknown") == (401, "invalid_api_key")
    assert code_of(serving, f"{key}x") == (401, "invalid_api_key")


def test_a_named_key_may_use_the_model_by_ollamas_api(serving: Serving) -> None:
    key = added(serving, "llm", "--requests-per-minute", "2")
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert serving.ask("GET", path, key=key)[0] == 200, path
    assert serving.ask("POST", "/api/show", {"model": "small"}, key=key)[0] == 200
    status, refused = serving.ask("POST", "/api/pull", {"model": "small"}, key=key)
    assert (status, list(refused)) == (403, ["error"])
    chat = {**CHAT, "stream": False}
    assert [serving.ask("POST", "/api/chat", chat, key=key)[0] for _ in range(3)] == [200, 200, 429]
    rows = [row for row in serving.document("usage?by=key")["rows"] if row["key"] == "llm"]
    assert [(row["requests"], row["errors"]) for row in rows] == [(2, 0)]
    assert rows[0]["tokens_out"] > 0


def test_an_admin_key_may_do_all(serving: Serving) -> None:
    key = added(serving, "boss", "--admin")
    assert serving.ask("GET", "/appliance/v1/status", key=key)[0] == 200
    assert serving.ask("GET", "/metrics", key=key)[0] == 200
    assert code_of(serving, key, "POST", "/appliance/v1/mode")[0] == 400, "asked, and told that no mode was named"
    assert code_of(serving, key) == (200, "")


def test_rotated_and_removed_without_a_restart(serving: Serving) -> None:
    old = added(serving, "worker")
    done = serving.home.command("keys", "rotate", "worker", "--json")
    new = json.loads(done.stdout)["key"]
    wait_for(serving, new, 200)
    assert code_of(serving, old) == (401, "invalid_api_key")
    assert serving.home.command("keys", "remove", "worker").stdout == "removed: worker\n"
    wait_for(serving, new, 401)
    assert serving.chat()[0] == 200


def limited(serving: Serving, key: str, path: str = "/v1/chat/completions") -> tuple[int, int, Any]:
    """Return status, Retry-After and error of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(CHAT), {"x-api-key": key})
        reply = connection.getresponse()
        return reply.status, int(reply.getheader("Retry-After") or 0), json.loads(reply.read())
    finally:
        connection.close()


def test_requests_per_minute_in_both_dialects(serving: Serving) -> None:
    key = added(serving, "slow", "--requests-per-minute", "2")
    assert [code_of(serving, key)[0] for _ in range(2)] == [200, 200]
    status, retry_s, answer = limited(serving, key)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (
        429,
        "requests_per_minute",
        "rate_limit_error",
    )
    assert 50 <= retry_s <= 60
    status, _, answer = limited(serving, key, "/v1/messages")
    assert (status, answer["type"], answer["error"]["type"]) == (429, "error", "rate_limit_error")
    assert "2 requests a minute (requests_per_minute)" in answer["error"]["message"]
    url = f"http://127.0.0.1:{serving.port}"
    with pytest.raises(openai.RateLimitError):
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).chat.completions.create(**CHAT)
    with pytest.raises(anthropic.RateLimitError):
        anthropic.Anthropic(base_url=url, api_key=key, max_retries=0).messages.create(**CHAT)
    assert serving.ask("GET", "/v1/models", key=key)[0] == 200
    assert serving.chat()[0] == 200, "the appliance's own key has no limit"


def test_tokens_per_minute(serving: Serving) -> None:
    key = added(serving, "few", "--tokens-per-minute", "1")
    assert code_of(serving, key) == (200, "")
    # The tokens are counted once the answer has ended, which its client may see a moment before.
    eventually(lambda: code_of(serving, key) == (429, "tokens_per_minute"))


def test_requests_at_the_same_time(serving: Serving) -> None:
    key = added(serving, "narrow", "--streams", "1")
    serving.home.set_engine()
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    body = json.dumps({**CHAT, "stream": True})
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()  # it runs from here on, and waits for its body
    eventually(lambda: code_of(serving, key) == (429, "streams"))
    connection.send(body.encode())
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
    connection.close()
    eventually(lambda: code_of(serving, key) == (200, ""))


def test_after_its_last_day(serving: Serving) -> None:
    gone, still = add(serving.home, "gone", "--until", "2020-02-29"), added(serving, "still", "--until", "9999-12-31")
    assert code_of(serving, gone) == (401, "key_ended")
    assert code_of(serving, still) == (200, "")


HOSTILE = (b"", b"{", b"[" * 100_000, b'{"keys": [{"name": "\x1b[2J"}]}', b"\0" * 4096, b"x" * (2**20 + 1))


def test_a_damaged_file_shuts_out_named_keys_alone(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    path = home.data / "secrets/keys.json"
    with home.serving() as serving:
        serving.wait_ready()
        key = added(serving, "ci")
        good = path.read_bytes()
        for data in HOSTILE:
            path.write_bytes(data)
            wait_for(serving, key, 401)
            assert serving.chat()[0] == 200
            path.write_bytes(good)
            wait_for(serving, key, 200)
        path.unlink()
        path.mkdir()
        wait_for(serving, key, 401)
        done = home.command("keys", "list")
        assert (done.returncode, str(path) in done.stderr) == (50, True)
        path.rmdir()
        path.write_bytes(good)
        wait_for(serving, key, 200)
        told = [line for line in serving.text.splitlines() if "no named key is accepted" in line]
        assert len(told) == len(HOSTILE) + 1
        assert all(str(path) in line for line in told)
        assert "\x1b" not in serving.text
        assert key not in serving.text
        serving.terminate()


def test_the_verb_lists_and_refuses(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    assert home.command("keys").stdout == ""
    key = add(home, "ci", "--requests-per-minute", "60", "--streams", "2", "--until", "2999-01-31")
    assert " 60 requests per minute, 2 streams, until 2999-01-31\n" in home.command("keys", "list").stdout
    (row,) = json.loads(home.command("keys", "--json").stdout)
    assert (row["name"], row["streams"], row["has_ended"]) == ("ci", 2, False)
    assert "sha256" not in row
    assert key not in json.dumps(row)
    for words, code, says in (
        (("add", "ci"), 10, "there is a key of this name: ci"),
        (("add", "a b"), 10, "not a name for a key: a b"),
        (("add",), 2, "keys add needs a name"),
        (("list", "ci"), 2, "keys list takes no name: ci"),
        (("remove", "anna"), 10, "no key has this name: anna"),
        (("rotate", "anna"), 10, "no key has this name: anna"),
        (("add", "b", "--streams", "0"), 2, "not a whole number above 0: 0"),
        (("add", "b", "--streams", "1000000"), 2, "--streams is over 100,000"),
        (("add", "b", "--until", "tomorrow"), 2, "not a day: tomorrow"),
        (("rotate", "ci", "--admin"), 2, "go with keys add, not with rotate"),
        (("delete", "ci"), 2, "invalid choice: 'delete'"),
    ):
        done = home.command("keys", *words)
        assert (done.returncode, says in done.stderr) == (code, True), done.stderr
