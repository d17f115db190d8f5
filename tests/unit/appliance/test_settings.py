from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigError, FatalError
from appliance.settings import SETTINGS, load_settings, parse_address, resolve_settings


def test_each_source_overrides_the_one_before_it_and_is_named() -> None:
    settings = resolve_settings(
        {"threads": "3"}, {"APPLIANCE_THREADS": "2", "APPLIANCE_PORT": "99"}, "threads: 1\nport: 98\nubatch: 64\n"
    )
    assert (settings.threads, settings.port, settings.ubatch, settings.parallel) == (3, 99, 64, 4)
    assert settings.sources["threads"] == "flag --threads"
    assert settings.sources["port"] == "variable APPLIANCE_PORT"
    assert settings.sources["ubatch"] == "file appliance.yaml"
    assert settings.sources["parallel"] == "default"


def test_file_is_read_from_the_volume(tmp_path: Path) -> None:
    (tmp_path / "appliance.yaml").write_text("ctx-size: 4096\nauth: off\n")
    settings = load_settings({}, {"APPLIANCE_DATA_DIR": str(tmp_path)})
    assert settings.ctx_size == 4096
    assert settings.auth is False
    assert str(tmp_path) in settings.sources["ctx_size"]


@pytest.mark.parametrize(
    ("flags", "environment", "text", "words"),
    [
        ({}, {"APPLIANCE_CTX_SZIE": "1"}, None, "perhaps you meant 'APPLIANCE_CTX_SIZE'"),
        ({}, {}, "ctx_szie: 1", "perhaps you meant 'ctx_size'"),
        ({}, {"APPLIANCE_API_KEY": "x"}, None, "mount yours as secrets/api_key of the volume"),
        ({}, {}, "token: x", "mount yours as secrets/api_key of the volume"),
        ({}, {"APPLIANCE_LOG_FORMAT": "xml"}, None, "known are APPLIANCE_MODEL, "),  # no near miss by the prefix alone
        ({}, {"APPLIANCE_CONTEXT_SIZE": "1"}, None, "perhaps you meant 'APPLIANCE_CTX_SIZE'"),
        ({}, {}, "threads: [1, 2]", "takes one value, not a list"),
        ({}, {}, "- a\n- b\n", "must hold `name: value` lines"),
        ({}, {}, "a: b: c", "is not YAML"),
        ({"ctx_size": "10"}, {}, None, "ctx_size is outside 256 to 16777216: '10' (flag --ctx-size)"),
        ({}, {"APPLIANCE_THREADS": "two"}, None, "threads is not a whole number: 'two' (variable APPLIANCE_THREADS)"),
        ({}, {"APPLIANCE_AUTH": "maybe"}, None, "auth is neither on nor off: 'maybe'"),
        ({}, {}, "kv_type: q8 0", "kv_type is no type, or two as in q8_0/q4_0: 'q8 0'"),
        ({}, {"APPLIANCE_BUDGET_S": "1"}, None, "outside 5 to 86400 seconds"),
        ({"model": " "}, {}, None, "model is empty"),
        ({"devices": ","}, {}, None, "devices names no GPU between its commas: ',' (flag --devices)"),
        ({"devices": "0,,1"}, {}, None, "devices names no GPU between its commas: '0,,1'"),
        ({"devices": "0, 0"}, {}, None, "devices names 0 twice: '0, 0'"),
        ({}, {"LWS_GROUP_SIZE": "two"}, None, "nodes is not a whole number: 'two' (variable LWS_GROUP_SIZE)"),
        ({"leader": "http://a/b"}, {}, None, "leader is not a host or HOST:PORT: 'http://a/b' (flag --leader)"),
        ({"leader": "a:70000"}, {}, None, "leader is not a host or HOST:PORT"),
        ({"leader": "a..b"}, {}, None, "leader is not a host or HOST:PORT: 'a..b' (flag --leader)"),
        ({"leader": "x" * 64}, {}, None, "leader is not a host or HOST:PORT"),
    ],
)
def test_every_mistake_is_named_with_its_value_and_source(
    flags: dict[str, str], environment: dict[str, str], text: str | None, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings(flags, environment, text)
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.exit_code == 10


def test_a_group_s_variables_are_the_defaults_of_ours() -> None:
    group = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "group-0.group.here"}
    found = resolve_settings({}, group)
    assert (found.nodes, found.node_rank, found.leader) == (2, 1, "group-0.group.here")
    assert found.sources["node_rank"] == "variable LWS_WORKER_INDEX"
    assert resolve_settings({}, {**group, "APPLIANCE_NODE_RANK": "0"}).node_rank == 0


@pytest.mark.parametrize(
    ("size", "nodes", "place"),
    [
        ("2", None, (2, 1, "group-0.group.here")),
        ("2", "2", (2, 1, "group-0.group.here")),
        ("2", "1", (1, 0, None)),
        ("2", "3", (3, 0, None)),
        ("1", None, (1, 0, None)),
        ("", "2", (2, 0, None)),
        ("100", None, (100, 1, "group-0.group.here")),  # every verb works there
    ],
)
def test_a_place_in_a_group_of_pods_is_ours_where_that_group_serves(
    size: str, nodes: str | None, place: tuple[int, int, str | None]
) -> None:
    group = {"LWS_GROUP_SIZE": size, "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "group-0.group.here"}
    found = resolve_settings({"nodes": nodes} if nodes else {}, group)
    assert (found.nodes, found.node_rank, found.leader) == place


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("node-0", ("node-0", None)),
        ("10.0.0.1:11435", ("10.0.0.1", 11435)),
        ("node-0.here.", ("node-0.here.", None)),
        ("x" * 63, ("x" * 63, None)),
        ("[fd00::1]:80", ("fd00::1", 80)),
        ("group-0.group.ns", ("group-0.group.ns", None)),
    ],
)
def test_an_address_is_a_host_with_or_without_a_port(text: str, parsed: tuple[str, int | None]) -> None:
    assert parse_address(text) == parsed


def test_empty_variables_and_service_links_are_no_settings() -> None:
    environment = {
        "APPLIANCE_MODEL": "",
        "APPLIANCE_PORT": "tcp://10.0.0.1:11435",
        "APPLIANCE_SERVICE_HOST": "10.0.0.1",
        "APPLIANCE_PORT_11435_TCP_ADDR": "10.0.0.1",
    }
    settings = resolve_settings({}, environment)
    assert settings.model is None
    assert settings.port == 11435


def test_an_address_is_not_taken_for_a_service_link() -> None:
    assert resolve_settings({}, {"APPLIANCE_MODEL": "https://example.org/m.gguf"}).model == "https://example.org/m.gguf"


def test_a_pipe_in_the_place_of_the_settings_file_is_waited_for_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "appliance.yaml")
    with pytest.raises(ConfigError, match=r"settings file cannot be read: .*it is not a regular file"):
        load_settings({"data_dir": str(tmp_path)}, {})


def test_unreadable_file_says_which(tmp_path: Path) -> None:
    (tmp_path / "appliance.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="settings file cannot be read"):
        load_settings({"data_dir": str(tmp_path)}, {})


def refusal(flags: dict[str, str], text: str | None = None) -> FatalError | None:
    try:
        resolve_settings(flags, {}, text)
    except FatalError as error:
        return error
    return None


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=20))
def test_any_value_is_taken_or_refused_in_words(name: str, value: str) -> None:
    error = refusal({name: value})
    assert error is None or name in error.message


@given(st.text(max_size=200))
def test_any_file_is_taken_or_refused_in_words(text: str) -> None:
    error = refusal({}, text)
    assert error is None or "appliance.yaml" in error.message


@pytest.mark.parametrize("text", ["/tmp/" + 5000 * "A", "/tmp" + 1300 * "/deep", "/tmp/" + 128 * "é"])
@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.metavar == "DIR"])
def test_a_path_that_no_kernel_looks_up_is_refused_where_it_is_given(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings({name: text}, {})
    assert f"setting {name} is longer than a path can be (4,095 bytes, 255 in each name): '/tmp" in caught.value.message
    assert caught.value.message.endswith(f"(flag {SETTINGS[name].flag})")
