"""What people give as the address of an endpoint, and where its key is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import ConfigError, EngineNotReadyError, UsageError
from appliance.host.docker.endpoint import (
    Endpoint,
    ServedModel,
    choose_model,
    given_endpoint,
    parse_url,
    raise_if_refused,
    read_key_file,
)
from appliance.host.docker.http import said_in

BASE = "http://127.0.0.1:11435/v1"
HERE = Endpoint(base=BASE)


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://127.0.0.1:11435", BASE),
        ("http://127.0.0.1:11435/", BASE),
        ("http://127.0.0.1:11435/v1/", BASE),
        ("http://127.0.0.1:11435/v1/chat/completions", BASE),
        ("http://127.0.0.1:11435/v1/models", BASE),
        ("https://example.com/api/openai/v3", "https://example.com/api/openai/v3"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_is_taken_as_people_copy_it(given: str, base: str) -> None:
    assert parse_url(given) == base


@pytest.mark.parametrize(
    "given",
    ["localhost:8000", "ftp://x/v1", "http://", "", "http://x/v1?key=1", "http://x:99999", "http://[::1", "http://x:0"],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="not the URL of an endpoint"):
        parse_url(given)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as error:
        parse_url("http://me:hunter2@example.com/v1")
    assert "hunter2" not in error.value.message


def test_the_root_is_for_clients_that_append_the_version() -> None:
    assert HERE.root == "http://127.0.0.1:11435"


def test_a_key_is_never_shown() -> None:
    assert "sk-1" not in repr(Endpoint(base=BASE, key="sk-1"))


def test_a_key_is_of_the_file_then_of_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-file\n")
    variables = {"OPENAI_API_KEY": "sk-variable"}
    assert given_endpoint(BASE, str(path), variables).key == "sk-file"
    assert given_endpoint(BASE, None, variables).key == "sk-variable"
    assert given_endpoint(BASE, None, {}).headers == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "is empty"), (" \n", "is empty"), ("a b", "not contain exactly one"), ("ä", "not contain exactly one")],
)
def test_a_key_file_without_one_key_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_key_file(path)


def test_a_variable_is_held_to_the_same() -> None:
    with pytest.raises(ConfigError, match="the variable OPENAI_API_KEY does not contain exactly one key"):
        given_endpoint(BASE, None, {"OPENAI_API_KEY": "sk-1\nX-Other: 1"})


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/nothing"):
        read_key_file(tmp_path / "nothing")


def test_a_model_is_the_only_one_or_the_one_asked_for() -> None:
    one, two = ServedModel(id="a", context=8192), ServedModel(id="b", context=None)
    assert choose_model(HERE, None, (one,)) == one
    assert choose_model(HERE, "a", (one, two)) == one
    assert choose_model(HERE, "alias", (one, two)) == ServedModel(id="alias", context=None)
    with pytest.raises(ConfigError, match="several models: a, b"):
        choose_model(HERE, None, (one, two))
    with pytest.raises(ConfigError, match="lists no models"):
        choose_model(HERE, None, ())


def test_a_refused_key_is_told_with_where_it_was_from() -> None:
    endpoint = Endpoint(base=BASE, key="sk-secret", key_source="from /tmp/key")
    with pytest.raises(ConfigError, match=r"refuses the key.*401.*from /tmp/key") as error:
        raise_if_refused(endpoint, 401, b'{"error": {"message": "unknown key"}}')
    assert "sk-secret" not in error.value.message


@pytest.mark.parametrize(
    ("status", "kind"), [(503, EngineNotReadyError), (429, EngineNotReadyError), (400, ConfigError)]
)
def test_a_busy_server_is_not_a_wrong_address(status: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        raise_if_refused(HERE, status, b"busy")
    raise_if_refused(HERE, 200, b"")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b'{"id": 1, "error": {"code": 7}}', "an object with id, error"),
        (b"<html>", "<html>"),
        (b"", "nothing"),
        (b"[]", "[]"),
    ],
)
def test_an_error_is_told_in_the_servers_words(body: bytes, words: str) -> None:
    assert said_in(body) == words
