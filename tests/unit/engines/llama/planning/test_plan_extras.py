"""What users of llama-server ask for beside what is planned: own arguments, template, thoughts, memory left alone."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama import server
from appliance.engines.llama.planning.engine_args import OWNED, UNOFFERED
from appliance.engines.llama.planning.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.server import arguments
from appliance.errors import ConfigError
from appliance.plan import Plan
from appliance.profile import Key, make_key
from appliance.profile.record import parse_plan
from appliance.settings import SETTINGS, is_flag, resolve_settings
from tests.builders import DIGEST, ENGINE, IMAGE, SMALL, USAGE, facts, machine, model
from tests.golden.machines import MACHINES

SOCKET = Path("/tmp/e.sock")
CARD = "t4"


def space(**flags: str | list[str]) -> Space:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(), SMALL)


def on_card(**flags: str) -> Plan:
    image, engine = facts(has_cuda=True)
    return Space(resolve_settings(flags, {}), image, engine, MACHINES[CARD], model("llama-3.1-8b", "Q4_K_M")).best


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        space(engine_arg=list(words))
    assert caught.value.exit_code == 10
    return caught.value


def argv(plan: Plan) -> tuple[str, ...]:
    return arguments(plan, ENGINE, SOCKET)


def choice(plan: Plan, name: str) -> tuple[str, str, str]:
    (found,) = [each for each in plan.choices if each.name == name]
    return found.value, found.reason, found.source


def test_arguments_reach_the_engine_as_they_are() -> None:
    plan = space(engine_arg=["--top-k 20 --temp -0.5", "--chat-template-kwargs '{\"a\": 1}'", "--no-warmup"]).best
    words = ("--top-k", "20", "--temp", "-0.5", "--chat-template-kwargs", '{"a": 1}', "--no-warmup")
    assert launch_of(plan).extras.engine_args == words
    at = argv(plan).index("--top-k")
    assert argv(plan)[at : at + len(words)] == words
    value, reason, source = choice(plan, "engine_arg")
    assert value == "--top-k 20 --temp -0.5 --chat-template-kwargs '{\"a\": 1}' --no-warmup"
    assert (reason, source) == ("passed to the engine as it is", "flag --engine-arg")


def test_every_plan_of_the_space_and_of_an_earlier_start_has_them() -> None:
    asked = space(engine_arg="--top-k 20")
    assert all("--top-k" in argv(plan) for plan in asked.all())
    now = asked.now(space(engine_arg="--top-k 40", reasoning_format="none").best)
    assert isinstance(now, Plan)
    assert launch_of(now).extras == launch_of(asked.best).extras  # of today, whatever was asked for then


def test_what_the_figures_know_nothing_of_is_said() -> None:
    plan = space(engine_arg="-ot 'ffn_.*=CPU' --no-kv-offload --top-k 1").best
    assert choice(plan, "engine_arg")[1].endswith("; the figures here are without -ot and --no-kv-offload")


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("--topk 20", "a flag that this engine has not: --topk", "perhaps you meant --top-k"),
        ("--ctx_size 1", "a flag that this engine has not: --ctx_size", "perhaps you meant --ctx-size"),
        ("--frobnicate", "a flag that this engine has not: --frobnicate", "build 11312"),
        ("-c 4096", "the setting ctx_size stands for: -c", "use --ctx-size N"),
        ("--top-k 2 --n-gpu-layers=99", "the setting gpu_layers stands for: --n-gpu-layers", "use --gpu-layers N"),
        ("--fit-target 2048", "the setting reserve_mib stands for: --fit-target", "use --reserve-mib MIB"),
        ("--flash-attn off", "cannot be given: --flash-attn", "take it out"),
        ("--api-key x", "the setting auth stands for: --api-key", "use --auth on|off"),
        ("--log-verbosity 0", "the appliance reads the engine's log", "take it out"),
        ("--override-kv llama.context_length=int:9", "the setting ctx_size stands for", "--rope-scaling yarn"),
    ],
)
def test_what_is_unknown_or_decided_by_the_plan_is_refused(words: str, said: str, hint: str) -> None:
    error = refusal(words)
    assert said in error.message
    assert "(flag --engine-arg)" in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grammar 'a\nb'", "holds a line break or another character that no argument has: '--grammar 'a\\nb''"),
        ("--grammar a\0", "holds a line break or another character that no argument has: '--grammar a\\x00'"),
        ("--grammar 'a", "has a quotation mark that is not closed"),
        ("20", "does not begin with a flag of the engine"),
        ("", "does not begin with a flag of the engine"),
    ],
)
def test_what_is_no_argument_is_refused_with_its_source(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_settings({}, {}, json.dumps({"engine_arg": ["--top-k 2", words]}))
    assert said in caught.value.message
    assert caught.value.message.endswith("(file appliance.yaml)")


def test_every_source_may_hold_several() -> None:
    text = "engine_arg:\n- --top-k 1\n- --no-warmup\nlora: [a.gguf, 'b.gguf:0.5']\n"
    of_file = resolve_settings({}, {}, text)
    assert of_file.engine_arg == ("--top-k", "1", "--no-warmup")
    assert of_file.lora == ("a.gguf", "b.gguf:0.5")
    of_variable = resolve_settings({}, {"APPLIANCE_ENGINE_ARG": "--top-k 2 --temp=0", "APPLIANCE_LORA": "c, d:2"}, text)
    assert of_variable.engine_arg == ("--top-k", "2", "--temp", "0")
    assert of_variable.lora == ("c", "d:2")
    of_flags = resolve_settings({"engine_arg": ["--top-k 3", "--mlock"]}, {"APPLIANCE_ENGINE_ARG": "--top-k 2"}, text)
    assert of_flags.engine_arg == ("--top-k", "3", "--mlock")


@given(st.text(alphabet="-=' \"abck02._", max_size=30))
def test_no_text_brings_a_flag_of_the_plan_to_the_engine(text: str) -> None:
    try:
        plan = space(engine_arg=f"--top-k 1 {text}").best
    except ConfigError:
        return
    passed = launch_of(plan).extras.engine_args
    assert not {word for word in passed if is_flag(word)} & {*OWNED, *UNOFFERED}
    assert all(word in ENGINE.flags for word in passed if is_flag(word))


def entries() -> list[set[str]]:
    """Spellings of one entry of the engine's own help."""
    heads = [re.split(r"\s{2,}(?![\s-])", line, maxsplit=1)[0] for line in USAGE.splitlines() if line.startswith("-")]
    return [set(re.findall(r"(?:^|[\s,])(--?[A-Za-z][A-Za-z0-9-]*)", head)) for head in heads]


def test_a_flag_is_refused_in_every_spelling_or_in_none() -> None:
    owned = {*OWNED, *UNOFFERED}
    halved = [names for names in entries() if names & owned and not names <= owned]
    assert not halved


def test_every_flag_that_a_plan_uses_is_refused() -> None:
    used = set(re.findall(r'flags\.(?:need|use)\("(--[a-z-]+)"', inspect.getsource(server)))
    assert len(used) > 30
    assert used - {*OWNED, *UNOFFERED} == {"--override-kv"}  # of other keys it may be given
    assert all(name in SETTINGS for name in OWNED.values())


def test_they_are_part_of_the_key() -> None:
    def key(**flags: str) -> Key:
        return make_key(resolve_settings(flags, {}), IMAGE, machine(), DIGEST)

    ids = {key(**flags).id for flags in ({}, {"engine_arg": "--top-k 1"}, {"reserve_mib": "512"}, {"lora": "a.gguf"})}
    assert len(ids) == 4


def test_a_plan_with_them_is_read_back_from_its_profile() -> None:
    plan = replace(space(engine_arg="--top-k 1", chat_template_file="/data/t.jinja").best, choices=())
    assert parse_plan(json.loads(json.dumps(asdict(plan)))) == plan


def test_template_and_thoughts_have_settings_of_their_own() -> None:
    plan = space(chat_template_file="/data/t.jinja", reasoning_format="deepseek").best
    words = argv(plan)
    assert words[words.index("--chat-template-file") + 1] == "/data/t.jinja"
    assert words[words.index("--reasoning-format") + 1] == "deepseek"
    assert choice(plan, "chat_template_file")[:2] == ("/data/t.jinja", "used instead of the model's own template")
    without = argv(space().best)
    assert not {"--chat-template-file", "--reasoning-format"} & set(without)


def test_memory_is_left_alone_on_each_card() -> None:
    usual, modest = on_card(), on_card(reserve_mib="4096")
    (before,), (after,) = usual.placement.shares, modest.placement.shares
    assert before.gpu.free_mib - after.gpu.free_mib == 4096
    assert after.memory.total <= after.gpu.free_mib
    assert modest.context < usual.context
    assert choice(modest, "reserve_mib") == ("4,096", "left alone of what is free on each GPU", "flag --reserve-mib")
    assert choice(space(reserve_mib="1").best, "reserve_mib")[1] == "there is no GPU to leave it on"


def test_a_card_that_is_left_alone_as_a_whole_is_not_used() -> None:
    assert not on_card(reserve_mib="65536").placement.shares
