"""Prompts that llama-server keeps on disk: its arguments, and the key of states."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.command import Command
from appliance.engines.engine import PromptFolder
from appliance.engines.llama.process.prompt_disk import FLAG, STOP_MS, VARIABLE, WITHOUT_EFFECT, keep_prompts, key_of
from appliance.engines.llama.process.server import arguments
from tests.builders import ENGINE
from tests.unit.engines.llama.test_engine_llama import SOCKET, chosen

SECRET = "0123456789abcdef" * 2
FACTS = replace(ENGINE, flags=(*ENGINE.flags, FLAG))
FOLDER = PromptFolder(path=Path("/data/cache/prompts"), limit_mib=512, secret=SECRET, model="a" * 16, attached=())
WORDS = st.text("abcdefghij0123456789.:/", min_size=1, max_size=8)
OPTIONS = st.dictionaries(
    st.text("abcdefghij-", min_size=2, max_size=10).map(lambda text: f"--x{text}"), st.lists(WORDS, max_size=2)
)


async def _never() -> bool:
    return False


def command_of(*arguments: str) -> Command:
    return Command(argv=("/opt/llama/llama-server", *arguments), environment={"LANG": "C"}, is_ready=_never)


def line(options: dict[str, list[str]]) -> list[str]:
    return ["llama-server", *(word for flag, values in options.items() for word in (flag, *values))]


def test_a_serving_engine_gets_folder_bound_key_and_secret() -> None:
    found = keep_prompts(command_of("--model", "/m.gguf", "--threads", "2"), FACTS, FOLDER)
    assert found.argv[:5] == ("/opt/llama/llama-server", "--model", "/m.gguf", "--threads", "2")
    assert found.argv[-1] == "--metrics"
    given_options = dict(zip(found.argv[5:-1:2], found.argv[6:-1:2], strict=True))
    key = given_options.pop("--cache-disk-key")
    assert given_options == {
        "--cache-disk": "/data/cache/prompts",
        "--cache-disk-mib": "512",
        "--cache-disk-stop-ms": str(STOP_MS),
    }
    assert re.fullmatch(r"a{16}-[0-9a-f]{32}", key)
    assert found.environment == {"LANG": "C", VARIABLE: SECRET}
    assert not any(SECRET in word for word in found.argv)


def test_time_is_left_between_saving_and_the_kill() -> None:
    assert Command(argv=("x",), is_ready=_never).stop_grace_s - 0.5 >= STOP_MS / 1000


def test_an_engine_without_the_option_is_started_as_before() -> None:
    command = command_of("--model", "/m.gguf")
    assert keep_prompts(command, ENGINE, FOLDER) is command


@given(OPTIONS, st.randoms())
def test_the_order_of_options_does_not_matter(options: dict[str, list[str]], random: object) -> None:
    shuffled = list(options)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = {flag: options[flag] for flag in shuffled}
    assert key_of(line(options), FACTS, FOLDER) == key_of(line(other), FACTS, FOLDER)


@given(OPTIONS, st.sampled_from(sorted(WITHOUT_EFFECT)), WORDS)
def test_an_option_of_the_list_keeps_the_key(options: dict[str, list[str]], flag: str, value: str) -> None:
    assert key_of(line({**options, flag: [value]}), FACTS, FOLDER) == key_of(line(options), FACTS, FOLDER)


@given(OPTIONS, st.text("klmnop", min_size=1, max_size=5), WORDS, WORDS)
def test_any_other_option_and_its_value_are_part_of_the_key(
    options: dict[str, list[str]], name: str, first: str, second: str
) -> None:
    keys = [
        key_of(line(each), FACTS, FOLDER)
        for each in (options, {**options, f"--{name}": [first]}, {**options, f"--{name}": [first, second]})
    ]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "change",
    [{"ctx_size": "2048"}, {"threads": "2"}, {"ubatch": "128"}, {"cache_ram_mib": "64"}, {"parallel": "2"}],
    ids=lambda change: next(iter(change)),
)
def test_another_plan_for_the_same_model_finds_its_prompts(change: dict[str, str]) -> None:
    keys = {
        key_of(("llama-server", *arguments(plan, FACTS, SOCKET)), FACTS, FOLDER)
        for plan in (chosen(), chosen(**change))
    }
    assert len(keys) == 1


def test_what_a_state_depends_on_is_in_the_key() -> None:
    argv = ("llama-server", *arguments(chosen(), FACTS, SOCKET))
    keys = [
        key_of(argv, FACTS, FOLDER),
        key_of(("llama-server", *arguments(chosen(kv_type="q8_0"), FACTS, SOCKET)), FACTS, FOLDER),
        key_of(argv, replace(FACTS, commit="f" * 9), FOLDER),
        key_of(argv, replace(FACTS, build=1), FOLDER),
        key_of(argv, FACTS, replace(FOLDER, attached=("b" * 16,))),
        key_of(argv, FACTS, replace(FOLDER, model="b" * 16)),
        key_of((*argv, "--rope-freq-base", "10000"), FACTS, FOLDER),
        key_of((*argv, "--lora-scaled", "/a.gguf:0.5"), FACTS, FOLDER),
        key_of((*argv, "--lora-scaled", "/a.gguf:1"), FACTS, FOLDER),
    ]
    assert len(set(keys)) == len(keys)


def test_a_negative_number_is_a_value_and_no_option() -> None:
    one, two = (key_of(["llama-server", "--threads", "-1", "--x", value], FACTS, FOLDER) for value in ("-1", "-2"))
    assert one != two
    assert key_of(["llama-server", "--threads", "-2", "--x", "-1"], FACTS, FOLDER) == one
