"""Names in the cache, and access to the token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import ConfigError
from appliance.settings import hub_settings, resolve_settings
from appliance.weights.cache.download_set import WantedFile, folder_of_repo, folder_of_url
from appliance.weights.download.login import origin


def test_names_as_the_hubs_client_has_them() -> None:
    assert folder_of_repo("org/repo") == "models--org--repo"
    assert folder_of_url("https://h/a", "h").startswith("models--url--h--")
    assert folder_of_url("https://h/a", "h") != folder_of_url("https://h/b", "h")


def test_the_key_of_a_plain_address_changes_with_the_file_behind_it() -> None:
    file = WantedFile(path="a", bytes=1, sha256=None, url="https://h/a", validator='"1"')
    keys = {file.key, replace(file, validator='"2"').key, replace(file, bytes=2).key, replace(file, url="x").key}
    assert len(keys) == 4
    assert all(key.startswith("url-") for key in keys)
    assert replace(file, sha256="c" * 64).key == "c" * 64
    assert replace(file, git_sha1="d" * 40).key == "d" * 40


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("https://hub/a", "https://hub:443/b", True),
        ("https://hub/a", "https://HUB/b", True),
        ("https://hub/a", "http://hub/a", False),
        ("https://hub/a", "https://hub:8443/a", False),
        ("https://hub/a", "https://cdn.hub/a", False),
        ("https://hub/a", "https://hub@evil/a", False),
    ],
)
def test_what_a_token_is_for(one: str, other: str, is_same: bool) -> None:
    assert (origin(one) == origin(other)) == is_same


def test_settings_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "hf/hub").mkdir(parents=True)
    environment = {"HF_ENDPOINT": "http://mirror:8080/hf/", "HF_TOKEN": "hf_abc", "HF_HUB_OFFLINE": "1"}
    hub = hub_settings(resolve_settings({}, {}), environment | {"HF_HOME": str(tmp_path / "hf")})
    assert (hub.endpoint, hub.token, hub.offline) == ("http://mirror:8080/hf", "hf_abc", True)
    assert tmp_path / "hf/hub" in hub.read_only_roots
    assert "hf_abc" not in repr(hub)
    assert not hub_settings(resolve_settings({"offline": "off"}, {}), environment).offline
    assert hub_settings(resolve_settings({"offline": "on"}, {}), {}).offline


def test_without_variables_it_is_the_hub_itself(tmp_path: Path) -> None:
    hub = hub_settings(resolve_settings({}, {}), {"HF_ENDPOINT": "", "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"})
    assert (hub.endpoint, hub.token, hub.offline) == ("https://huggingface.co", None, False)


def test_a_cache_that_is_the_volume_itself_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "other").mkdir()
    flags = {"data_dir": str(tmp_path)}
    hub = hub_settings(resolve_settings(flags, {}), {"HF_HUB_CACHE": str(tmp_path / "models")})
    assert tmp_path / "models" not in hub.read_only_roots
    named = flags | {"hf_cache": str(tmp_path / "other")}
    assert hub_settings(resolve_settings(named, {}), {}).read_only_roots[0] == tmp_path / "other"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HF_ENDPOINT", "huggingface.co"), ("HF_ENDPOINT", "https://user:secret@hub"), ("HF_TOKEN", "hf_secret\nx")],
)
def test_variables_that_cannot_be(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        hub_settings(resolve_settings({}, {}), {variable: value})
    assert "hf_secret" not in caught.value.message


def test_a_cache_that_is_listed_is_one_that_nothing_is_fetched_for(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    named = resolve_settings({"model_dirs": f"{tmp_path}/hf, {tmp_path}/missing"}, {})
    roots = hub_settings(named, {}).read_only_roots
    assert tmp_path / "hf" in roots
    assert tmp_path / "missing" not in roots
