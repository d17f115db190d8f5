"""The appliance becomes a channel of one-api by itself: the real program, a real gateway, a fake one-api."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.console.progress import Phase, Progress
from tests.ports import free_port
from tests.process.stages.gateway import KEY, eventually
from tests.process.stages.provision import (
    QWEN,
    Both,
    Front,
    access_token,
    an_appliance,
    begin,
    both,
    one_api,
    provision,
)

CHAT: dict[str, Any] = {"model": "qwen3-8b", "messages": [{"role": "user", "content": "one two three"}]}
READY = Progress(phase=Phase.READY)
LOADING = Progress(phase=Phase.LOADING, message="weights")
NEW = ("--kind", "new-api")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Both]:
    with both(tmp_path) as made:
        yield made


def test_channel_and_token_are_made_and_a_client_is_answered(stage: Both) -> None:
    done = stage.provision().row
    assert done["one_api"] == {"kind": "one-api", "version": "fake"}
    assert done["channel"] | {"fields": None} == {
        "name": "appliance",
        "id": 1,
        "did": "created",
        "fields": None,
        "models": ["qwen3-8b", "qwen:8b"],
        "context": 32768,
    }
    assert done["token"] | {"file": None} == {
        "name": "appliance",
        "id": 2,
        "did": "created",
        "file": None,
        "written": True,
    }
    assert done["listed"] is True
    channel = stage.front.channel
    assert (channel["type"], channel["status"], channel["key"]) == (1, 1, KEY)
    assert channel["base_url"] == stage.appliance.url  # no slash at its end, no /v1
    assert channel["models"] == "qwen3-8b,qwen:8b"
    assert "context 32768" in channel["other"]

    status, answer = stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert stage.appliance.engine_saw()["counts"]["POST /v1/chat/completions"] == 1


def test_no_secret_is_in_any_output(stage: Both) -> None:
    ended = stage.provision()
    for secret in (KEY, stage.token.removeprefix("sk-"), stage.access_token, stage.root_password):
        assert secret not in ended.out + ended.err
    assert (stage.folder / "token").stat().st_mode & 0o777 == 0o640


def test_a_second_run_changes_nothing(stage: Both) -> None:
    stage.provision()
    before = stage.front.state
    done = stage.provision().row
    after = stage.front.state
    assert (done["channel"]["did"], done["token"]["did"], done["token"]["written"]) == ("unchanged", "unchanged", False)
    assert done["set_up"] == []
    assert (after["channels"], after["tokens"], after["options"]) == (
        before["channels"],
        before["tokens"],
        before["options"],
    )
    asked = after["requests"][len(before["requests"]) :]
    assert [what for what in asked if not what.startswith("GET")] == ["POST /api/user/login"]


def test_the_first_run_closes_what_one_api_leaves_open_and_later_ones_do_not(stage: Both) -> None:
    done = stage.provision().row
    assert done["set_up"] == ["root's password is now that of the file", "registration is turned off"]
    assert stage.front.state["password"] == stage.root_password
    assert stage.front.state["options"]["RegisterEnabled"] == "false"
    for body in ({"password": "my-own-one"}, {"password": "my-own-one"}):
        stage.front.ask("PUT", "/api/user/self", body, key=stage.access_token)
    stage.front.ask("PUT", "/api/option/", {"key": "RegisterEnabled", "value": "true"}, key=stage.access_token)
    assert stage.provision().row["set_up"] == []
    assert stage.front.state["password"] == "my-own-one"
    assert stage.front.state["options"]["RegisterEnabled"] == "true"


def test_people_are_told_in_words(stage: Both) -> None:
    words = [word for word in stage.words() if word != "--json"]
    ended = provision(*words)
    assert ended.code == 0, ended.err
    assert "one-api  fake at http://127.0.0.1" in ended.out
    assert "channel  created: appliance, id 1, qwen3-8b, qwen:8b, context 32,768" in ended.out
    assert f"token    created: appliance, id 2, key in {stage.folder}/token" in ended.out
    assert "set up   registration is turned off" in ended.out
    assert "models   offered to clients" in ended.out


def test_another_name_that_begins_alike_is_another_channel(stage: Both) -> None:
    assert stage.provision("--channel", "appliance-2").row["channel"]["did"] == "created"
    assert stage.provision().row["channel"]["did"] == "created"
    assert [each["name"] for each in stage.front.state["channels"]] == ["appliance-2", "appliance"]


def test_both_sides_are_waited_for_with_words(tmp_path: Path) -> None:
    port = free_port()
    with an_appliance(tmp_path) as appliance:
        facts = {"bytes_done": 24, "bytes_total": 100}
        appliance.progress = Progress(phase=Phase.FETCHING, message="qwen3-8b", facts=facts)
        stage = Both(front=Front(port=port), appliance=appliance, folder=tmp_path)
        with begin(*stage.words()) as program:
            assert program.stderr
            assert program.stderr.readline() == f"waiting for one-api at {stage.front.url}\n"
            with one_api("--port", str(port), "--access-token", stage.access_token):
                assert "the model is being fetched: qwen3-8b, 24%" in program.stderr.readline()
                appliance.progress = READY
                out, err = program.communicate(timeout=180)
    assert program.returncode == 0, err
    assert json.loads(out)["channel"]["did"] == "created"


def test_a_new_model_and_a_new_context_are_followed(stage: Both) -> None:
    ready = stage.folder / "ready"
    with stage.following("--ready-file", str(ready)) as program:
        assert program.stdout
        assert json.loads(program.stdout.readline())["channel"]["did"] == "created"
        eventually(ready.exists)

        stage.appliance.progress = LOADING
        stage.appliance.listed = replace(QWEN, phase=Phase.LOADING, context=None)
        stage.appliance.listed = replace(QWEN, id="gemma", aliases=(), context=8192)
        stage.appliance.progress = READY
        done = json.loads(program.stdout.readline())["channel"]
        assert (done["did"], done["models"], done["context"]) == ("updated", ["gemma"], 8192)
        assert set(done["fields"]) == {"models", "other", "key"}

        stage.appliance.listed = replace(QWEN, id="gemma", aliases=(), context=4096)
        done = json.loads(program.stdout.readline())["channel"]
        assert (done["models"], done["context"]) == (["gemma"], 4096)
        assert stage.front.channel["models"] == "gemma"
        assert stage.front.ask("GET", "/v1/models", key=stage.token)[1]["data"] == [{"id": "gemma"}]

        program.send_signal(signal.SIGTERM)
        assert program.wait(90) == 0


def test_a_model_that_is_being_loaded_leaves_the_channel_as_it_is(stage: Both) -> None:
    with stage.following() as program:
        assert program.stdout
        assert program.stderr
        program.stdout.readline()
        stage.appliance.progress = LOADING
        stage.appliance.listed = replace(QWEN, id="half-known", context=None)
        assert "the appliance is not ready (loading), the channel stays" in program.stderr.readline()
        status, answer = stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        assert stage.front.channel["models"] == "qwen3-8b,qwen:8b"


def test_another_key_of_the_appliance_is_written_though_keys_are_never_read_back(stage: Both) -> None:
    stage.provision()
    token = stage.front.state["tokens"][0]["key"]
    stage.front.ask("PUT", "/api/channel/", {"id": 1, "key": "sk-old", "other": "x"}, key=stage.access_token)
    done = stage.provision().row
    assert done["channel"]["did"] == "updated"
    assert stage.front.channel["key"] == KEY
    assert stage.front.state["tokens"][0]["key"] == token


# 503 with our error's shape


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.READY, Phase.HELD)])
def test_an_appliance_that_is_not_ready_never_disables_its_channel(tmp_path: Path, phase: Phase) -> None:
    with both(tmp_path, "--disables") as stage:
        stage.provision()
        stage.appliance.progress = Progress(phase=phase)
        for _ in range(3):
            status, answer = stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)
            assert status == 503
            assert answer["error"]["type"] == "service_unavailable"
        assert stage.front.channel["status"] == 1
        stage.appliance.progress = READY
        assert stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)[0] == 200


def test_a_key_that_is_refused_disables_it_and_the_next_run_mends_both(tmp_path: Path) -> None:
    with both(tmp_path, "--disables") as stage:
        stage.provision()
        stage.front.ask("PUT", "/api/channel/", {"id": 1, "key": "sk-old", "other": "x"}, key=stage.access_token)
        assert stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)[0] == 401
        assert stage.front.channel["status"] == 3
        done = stage.provision().row
        assert done["channel"]["did"] == "updated"
        assert stage.front.channel["status"] == 1
        assert stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)[0] == 200


def test_what_a_person_disabled_stays_so(stage: Both) -> None:
    stage.provision()
    stage.front.ask("PUT", "/api/channel/", {"id": 1, "status": 2}, key=stage.access_token)
    done = stage.provision().row
    assert (done["channel"]["did"], done["listed"]) == ("left disabled", False)
    assert stage.front.channel["status"] == 2


# Kinds and quirks


@pytest.mark.parametrize("knobs", [NEW, (*NEW, "--old")], ids=["newest", "of-2025"])
def test_new_api_is_set_up_and_provisioned_twice(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    with both(tmp_path, *knobs) as stage:
        done = stage.provision("--kind").row
        assert done["one_api"]["kind"] == "new-api"
        assert done["set_up"] == ["root's password is now that of the file", "registration is turned off"]
        assert (done["channel"]["did"], done["token"]["did"], done["listed"]) == ("created", "created", True)
        assert stage.front.state["options"]["SelfUseModeEnabled"] == "true"
        assert stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)[0] == 200

        stage.appliance.listed = replace(QWEN, context=4096)
        again = stage.provision("--kind").row
        assert (again["channel"]["did"], again["token"]["did"]) == ("updated", "unchanged")
        assert again["set_up"] == []
        assert stage.provision("--kind").row["channel"]["did"] == "unchanged"


@pytest.mark.parametrize("knobs", [NEW, (*NEW, "--old")], ids=["newest", "of-2025"])
def test_new_api_is_enabled_again_after_it_disabled_the_channel(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    with both(tmp_path, *knobs, "--disables") as stage:
        stage.provision("--kind")
        stage.front.ask("PUT", "/api/channel/", {"id": 1, "key": "sk-old"}, key=stage.access_token)
        stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)
        assert stage.front.channel["status"] == 3
        assert stage.provision("--kind").row["channel"]["did"] == "enabled"
        assert stage.front.channel["status"] == 1


def test_new_api_opens_to_an_access_token_of_its_own(tmp_path: Path) -> None:
    with both(tmp_path, *NEW, "--set-up") as stage:
        assert stage.provision().row["channel"]["did"] == "created"
        assert stage.front.state["logins"] == 0


def test_a_database_that_knows_another_access_token_is_opened_with_the_password(tmp_path: Path) -> None:
    with both(tmp_path, "--old-volume", "--root-password", "x") as stage:
        (stage.folder / "secrets/root_password").write_text("long-enough-one\n")
        assert stage.provision().code == 10
    with both(tmp_path, "--old-volume", "--root-password", "long-enough-one") as stage:
        assert stage.provision().row["channel"]["did"] == "created"


@pytest.mark.parametrize("knobs", [("--busy", "3"), ("--postgres",), ("--cache-s", "1")])
def test_what_passes_is_outlasted(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    with both(tmp_path, *knobs) as stage:
        done = stage.provision().row
        assert (done["channel"]["did"], done["token"]["did"], done["listed"]) == ("created", "created", True)


# Bad input


def test_one_api_that_never_comes_up_is_said_within_the_limit(tmp_path: Path) -> None:
    with both(tmp_path, "--up-after", "600") as stage:
        ended = stage.provision("--wait-s", "1")
    assert ended.code == 43
    assert f"error: one-api did not start within 1 s: {stage.front.url}: ConnectionRefusedError" in ended.err
    assert "docs/one-api.md" in ended.err


def test_an_appliance_that_is_never_ready_is_said_within_the_limit(stage: Both) -> None:
    stage.appliance.progress = LOADING
    ended = stage.provision("--model-wait-s", "1")
    assert ended.code == 43
    assert (
        f"the appliance was not ready within 1 s: {stage.appliance.url}: the model is being loaded: weights"
        in ended.err
    )
    assert stage.front.state["channels"] == []


def test_two_channels_of_one_name_are_left_to_the_user(tmp_path: Path) -> None:
    with both(tmp_path, "--twice") as stage:
        for _ in range(2):  # made at the same moment by somebody else, and found so the next time
            ended = stage.provision()
            assert ended.code == 10
            assert "error: there are 2 channels named 'appliance': ids 1, 2" in ended.err
            assert "--channel NAME" in ended.err
        assert len(stage.front.state["channels"]) == 2


@pytest.mark.parametrize(
    ("knobs", "words", "message"),
    [
        (("--fail", "POST /api/channel/"), (), "one-api refuses: POST /api/channel/: 数据库错误"),
        (("--fail", "GET /api/channel/"), (), "one-api refuses: GET /api/channel/search"),
        (("--fail", "POST /api/token/"), (), "one-api refuses: POST /api/token/: 数据库错误"),
        (
            ("--old-volume", "--root-password", "x"),
            (),
            "root's password was refused: POST /api/user/login: 用户名或密码错误",
        ),
        ((*NEW, "--set-up"), ("--kind",), "root's password was refused"),
        ((*NEW, "--set-up", "--old-volume"), (), "new-api refuses the access token: GET /api/user/self"),
    ],
)
def test_a_refusal_with_status_200_is_a_refusal(
    tmp_path: Path, knobs: tuple[str, ...], words: tuple[str, ...], message: str
) -> None:
    with both(tmp_path, *knobs) as stage:
        ended = stage.provision(*words)
    assert ended.code == 10
    assert f"error: {message}" in ended.err
    assert "hint: " in ended.err


def test_logins_that_are_limited_are_said_and_not_repeated(tmp_path: Path) -> None:
    with both(tmp_path, *NEW, "--set-up", "--login-limit", "0") as stage:
        ended = stage.provision("--kind")
        assert ended.code == 43
        assert "/api/user/login keeps answering 429" in ended.err
        assert stage.front.state["logins"] <= 4


def test_a_second_factor_is_no_programs(tmp_path: Path) -> None:
    with both(tmp_path, *NEW, "--set-up", "--second-factor", "--root-password", "long-enough-one") as stage:
        (stage.folder / "secrets/root_password").write_text("long-enough-one\n")
        ended = stage.provision("--kind")
    assert ended.code == 10
    assert "requires a second factor" in ended.err
    assert "--access-token-file" in ended.err


def test_the_appliances_key_that_is_missing_or_another_one_is_said(stage: Both) -> None:
    (stage.folder / "api_key").unlink()
    ended = stage.provision()
    assert (ended.code, "the appliance's key cannot be read" in ended.err) == (10, True)
    (stage.folder / "api_key").write_text("sk-another\n")
    ended = stage.provision()
    assert (ended.code, "the appliance refuses its key" in ended.err) == (10, True)
    assert stage.front.state["channels"] == []


def test_an_alias_with_a_comma_would_be_two_models(stage: Both) -> None:
    stage.appliance.listed = replace(QWEN, aliases=("a,b",))
    ended = stage.provision()
    assert ended.code == 10
    assert "cannot be used in a channel: 'a,b'" in ended.err
    assert stage.front.state["channels"] == []


def test_trouble_while_following_is_said_once_and_goes_by(stage: Both) -> None:
    with stage.following() as program:
        assert program.stdout
        assert program.stderr
        program.stdout.readline()
        (stage.folder / "api_key").write_text("sk-another\n")
        assert "the appliance refuses its key" in program.stderr.readline()
        (stage.folder / "api_key").write_text(f"{KEY}\n")
        stage.appliance.listed = replace(QWEN, context=512)
        assert json.loads(program.stdout.readline())["channel"]["context"] == 512
        program.send_signal(signal.SIGTERM)
        assert program.wait(90) == 0
        assert program.stderr.read() == ""


def test_one_api_that_comes_back_with_an_empty_database_is_provisioned_again(tmp_path: Path) -> None:
    port = free_port()
    with an_appliance(tmp_path) as appliance:
        knobs = ("--port", str(port), "--access-token", access_token(tmp_path))
        stage = Both(front=Front(port=port), appliance=appliance, folder=tmp_path)
        with stage.following() as program:
            assert program.stdout
            assert program.stderr
            assert "waiting for one-api" in program.stderr.readline()
            with one_api(*knobs):
                assert json.loads(program.stdout.readline())["channel"]["did"] == "created"
                before = stage.token
            assert "the server does not answer: " in program.stderr.readline()
            with one_api(*knobs):
                assert json.loads(program.stdout.readline())["channel"]["did"] == "created"
                assert stage.token != before
                assert stage.front.ask("POST", "/v1/chat/completions", CHAT, key=stage.token)[0] == 200


@pytest.mark.parametrize("knobs", [NEW, (*NEW, "--old")], ids=["newest", "of-2025"])
def test_a_login_that_ended_is_made_again_without_a_word(tmp_path: Path, knobs: tuple[str, ...]) -> None:
    words = ("--kind", "--login-every-s", "0.5")
    with (
        both(tmp_path, *knobs, "--session-s", "3", "--login-limit", "1000") as stage,
        stage.following(*words) as program,
    ):
        assert program.stdout
        assert program.stderr
        program.stdout.readline()
        eventually(lambda: stage.front.state["logins"] >= 3)
        stage.appliance.listed = replace(QWEN, context=512)
        assert json.loads(program.stdout.readline())["channel"]["context"] == 512
        program.send_signal(signal.SIGTERM)
        assert program.wait(90) == 0
        assert program.stderr.read() == ""


def test_a_refusal_that_lasts_is_said_once_and_logins_are_few(tmp_path: Path) -> None:
    over = tmp_path / "over"
    with both(tmp_path, *NEW, "--sessions-end", str(over), "--login-limit", "1") as stage:
        with stage.following("--kind") as program:
            assert program.stdout
            assert program.stderr
            program.stdout.readline()
            over.touch()
            said = program.stderr.readline()
            assert said.startswith("one-api refuses: GET /api/channel/search")
            assert "access token 无效; retrying" in said
            before = len(stage.front.state["requests"])
            eventually(lambda: len(stage.front.state["requests"]) > before + 20)
            program.send_signal(signal.SIGTERM)
            assert program.wait(90) == 0
            assert program.stderr.read() == ""
        assert stage.front.state["logins"] == 1
