"""A launch as options for Docker, as a docker line and as a label; all three hardened as compose does it."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.host.docker.launch import (
    DEFAULTS,
    GRACE_S,
    LABEL,
    RETRIES,
    Bind,
    GpuRequest,
    Launch,
    command_line,
    container_name,
    create_options,
    parse_label,
)
from tests.builders import examples

LAUNCH = Launch(
    name="appliance-one",
    image="appliance:cell",
    model="m.gguf",
    settings={"APPLIANCE_MODEL": "/models/m.gguf"},
    passed=("HF_TOKEN",),
    binds=(Bind(source="/home/me/m.gguf", target="/models/m.gguf"),),
    volume="appliance",
    bind="127.0.0.1",
    port=11435,
    user="1000:0",
    gpus=None,
    restarts=True,
)
HERE = {"HF_TOKEN": "hf_secret", "OTHER": "x"}


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    document = yaml.safe_load((Path(__file__).parents[3] / "compose/appliance.yaml").read_text())
    service: dict[str, Any] = document["services"]["appliance"]
    return service


def test_it_is_hardened_as_compose_is(service: dict[str, Any]) -> None:
    container, host = create_options(LAUNCH, HERE)
    assert host["read_only"] is service["read_only"] is True
    assert list(host["tmpfs"]) == service["tmpfs"]
    assert host["cap_drop"] == service["cap_drop"]
    assert host["security_opt"] == service["security_opt"]
    assert host["shm_size"] == service["shm_size"]
    assert f"{container['stop_timeout']}s" == service["stop_grace_period"]
    assert service["restart"] == f"{host['restart_policy']['Name']}:{host['restart_policy']['MaximumRetryCount']}"
    assert {name: service["environment"][name] for name in DEFAULTS} == {
        name: f"${{{name}:-{value}}}" for name, value in DEFAULTS.items()
    }


def test_the_line_has_all_that_the_options_have() -> None:
    words = command_line(LAUNCH)
    assert words[:3] == ("docker", "run", "--detach")
    assert words[-1] == LAUNCH.image
    pairs = set(itertools.pairwise(words))
    assert {
        ("--name", LAUNCH.name), ("--pull", "never"), ("--tmpfs", "/tmp"), ("--cap-drop", "ALL"), ("--user", "1000:0"),
        ("--security-opt", "no-new-privileges:true"), ("--stop-timeout", str(GRACE_S)), ("--env", "HF_TOKEN"),
        ("--shm-size", "4g"), ("--restart", f"on-failure:{RETRIES}"), ("--env", "APPLIANCE_MODEL=/models/m.gguf"),
        ("--publish", "127.0.0.1:11435:11435"), ("--volume", "appliance:/data"),
        ("--mount", "type=bind,source=/home/me/m.gguf,target=/models/m.gguf,readonly"),
    } <= pairs  # fmt: skip
    assert "--read-only" in words


def test_a_secret_is_in_the_environment_and_nowhere_else() -> None:
    container, _ = create_options(LAUNCH, HERE)
    assert container["environment"] == {"APPLIANCE_MODEL": "/models/m.gguf", "HF_TOKEN": "hf_secret"}
    assert "hf_secret" not in container["labels"][LABEL] + " ".join(command_line(LAUNCH)) + repr(LAUNCH)


@pytest.mark.parametrize(
    ("gpus", "words", "asked"),
    [
        (GpuRequest(driver="nvidia"), ["--gpus", "all"], {"Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]]}),
        (
            GpuRequest(driver="nvidia", devices=("0", "1")), ["--gpus", '"device=0,1"'],
            {"Count": 0, "DeviceIDs": ["0", "1"], "Capabilities": [["gpu"]]},
        ),
        (
            GpuRequest(driver="cdi", devices=("nvidia.com/gpu=0", "nvidia.com/gpu=1")),
            ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1"],
            {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]},
        ),
    ],
)  # fmt: skip
def test_gpus_of_the_runtime_and_of_cdi(gpus: GpuRequest, words: list[str], asked: dict[str, Any]) -> None:
    launch = replace(LAUNCH, gpus=gpus)
    _, host = create_options(launch, HERE)
    [made] = host["device_requests"]
    assert made.items() >= asked.items()
    line = list(command_line(launch))
    start = line.index(words[0])
    assert line[start : start + len(words)] == words


texts = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", codec="utf-8"), min_size=1, max_size=20)
launches = st.builds(
    replace,
    st.just(LAUNCH),
    model=texts,
    settings=st.dictionaries(texts, texts, max_size=3),
    passed=st.lists(texts, max_size=2).map(tuple),
    binds=st.lists(st.builds(Bind, source=texts, target=texts), max_size=3).map(tuple),
    gpus=st.none() | st.builds(GpuRequest, driver=st.sampled_from(["nvidia", "cdi"]), devices=st.just(("0",))),
    restarts=st.booleans(),
)


@settings(max_examples=examples(50))
@given(launches)
def test_a_label_gives_the_same_launch(launch: Launch) -> None:
    assert parse_label(launch.as_label()) == launch


@settings(max_examples=examples(50))
@given(launches)
def test_docker_reads_each_path_of_a_mount_as_it_is(launch: Launch) -> None:
    """Docker reads a mount as a row of CSV (moby's parser of --mount)."""
    words = command_line(launch)
    mounts = [word for name, word in itertools.pairwise(words) if name == "--mount"]
    for word, bind in zip(mounts, launch.binds, strict=True):
        [row] = csv.reader([word], strict=True)
        assert row == ["type=bind", f"source={bind.source}", f"target={bind.target}", "readonly"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": 1}', "no JSON"])
def test_another_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_label(text)


def test_every_field_is_in_the_label() -> None:
    joined = replace(LAUNCH, networks=("shop_default",), alias="llm")
    assert all(f'"{field.name}"' in joined.as_label() for field in fields(Launch))


@settings(max_examples=examples(100))
@given(st.text(max_size=40))
def test_any_word_becomes_a_name_that_docker_takes(word: str) -> None:
    name = container_name(word)
    assert name.startswith("appliance-")
    assert len(name) > len("appliance-")
    assert all(letter.isascii() and (letter.isalnum() or letter in "_.-") for letter in name)
    assert name[-1].isalnum() or name[-1] == "_"


def test_a_label_from_before_there_were_networks_is_still_read() -> None:
    assert {"networks", "alias"} & set(json.loads(LAUNCH.as_label())) == set()  # older commands refuse unknown fields
    assert parse_label(LAUNCH.as_label()) == LAUNCH
    joined = replace(LAUNCH, networks=("shop_default",), alias="llm")
    assert parse_label(joined.as_label()) == joined
