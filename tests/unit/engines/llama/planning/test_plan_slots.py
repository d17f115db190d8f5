"""Slots from users, and what keeps a conversation: the cache where it takes the longest, else the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.memory.memory import kv_mib, layers_of
from appliance.engines.llama.planning.memory.slots import conversation_mib
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import arguments
from appliance.errors import ModelDoesNotFitError
from appliance.model import Model
from appliance.plan import Choice, Plan
from appliance.settings import resolve_settings
from tests.builders import ENGINE, IMAGE, LARGE, SMALL, machine, model

SOCKET = Path("/tmp/e.sock")
PUBLISHED_8B = model("llama-3.1-8b", "Q4_K_M")


def first(model: Model = SMALL, *, total_mib: int = 16384, **flags: str) -> Plan:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, machine(total_mib=total_mib), model).best


def choice(found: Plan, name: str) -> Choice:
    return next(c for c in found.choices if c.name == name)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 4),
        ({"users": "3"}, 4),
        ({"users": "4"}, 5),
        ({"users": "16"}, 17),
        ({"users": "16", "parallel": "2"}, 2),
        ({"users": "16", "parallel": "4"}, 4),  # asked for, though it is the default
        ({"parallel": "1"}, 1),
    ],
)
def test_slots_follow_users_unless_asked_for(flags: dict[str, Any], expected: int) -> None:
    assert resolve_settings(flags, {}).slots == expected
    assert first(**flags).parallel == expected


def test_slots_of_users_need_memory_where_each_has_its_own() -> None:
    stack = tuple(replace(layer, window=512) for layer in layers_of(SMALL))
    few, many = (first(replace(SMALL, stack=stack), users=users) for users in ("1", "20"))
    assert many.memory.kv > 2 * few.memory.kv
    assert first(users="20").memory.kv == first().memory.kv  # cells that all slots share


def test_users_read_what_each_gets() -> None:
    found = choice(first(users="4", ctx_size="8192"), "parallel")
    assert found.value == "5"
    assert found.source == "flag --users"
    assert (
        "4 users at once and 1 beside them; one request alone has all 8,192 tokens, each has 2,048 when all run"
        in found.reason
    )
    queued = choice(first(users="4", parallel="2", ctx_size="8192"), "parallel")
    assert queued.source == "flag --parallel"
    assert "2 at once, of 4 users; one request alone has all 8,192 tokens, each has 4,096 when all run" in queued.reason
    even = choice(first(users="4", parallel="4"), "parallel")
    assert "4 users at once, none beside them" in even.reason


def test_one_slot_says_that_a_second_request_waits() -> None:
    assert "a second request waits for the first" in choice(first(parallel="1"), "parallel").reason
    assert "a second request runs beside the first" in choice(first(), "parallel").reason


def test_one_slot_is_saved_before_any_other_request_takes_it() -> None:
    argv = arguments(first(parallel="1"), ENGINE, SOCKET)
    assert argv[argv.index("--slot-prompt-similarity") + 1] == "0"
    assert "each turn a copy to it" in choice(first(parallel="1"), "parallel").detail
    assert "all of it if both do not fit into the context together" in choice(first(), "parallel").detail


def test_a_small_cache_keeps_idle_slots_in_the_context_and_says_so() -> None:
    found = first(cache_ram_mib="16", ctx_size="8192")
    assert launch_of(found).idle_slots_stay
    argv = arguments(found, ENGINE, SOCKET)
    assert "--no-cache-idle-slots" in argv
    assert argv[argv.index("--slot-prompt-similarity") + 1] == "0.5"
    kept = choice(found, "idle_slots")
    held = 8192 * 16 / kv_mib(SMALL, found.kv_type, 8192, launch_of(found).ubatch, 1)
    assert f"would take {int(held):,} of the context's 8,192 tokens" in kept.reason
    assert "the 4th other one" in kept.reason


def test_a_cache_that_takes_the_longest_conversation_leaves_the_engine_its_default() -> None:
    found = first(ctx_size="8192")
    assert not launch_of(found).idle_slots_stay
    argv = arguments(found, ENGINE, SOCKET)
    assert "--no-cache-idle-slots" not in argv
    assert "--slot-prompt-similarity" not in argv
    assert "idle_slots" not in [c.name for c in found.choices]


def test_one_slot_and_a_small_cache_say_what_is_lost() -> None:
    found = first(parallel="1", cache_ram_mib="16", ctx_size="8192")
    assert not launch_of(found).idle_slots_stay
    assert "with one slot, what is longer is read anew after another request" in choice(found, "idle_slots").reason


def test_the_cache_takes_one_conversation_of_the_whole_window_where_memory_is_left() -> None:
    found = first(LARGE, total_mib=131072, fill_minutes="0")
    needed = conversation_mib(
        LARGE, found.kv_type, found.context, ubatch=launch_of(found).ubatch, checkpoints=launch_of(found).checkpoints
    )
    assert needed > 8192
    assert launch_of(found).cache_ram_mib >= needed
    assert not launch_of(found).idle_slots_stay


@given(st.integers(2048, 65536), st.sampled_from([SMALL, LARGE]), st.integers(1, 20))
def test_no_conversation_is_ever_left_to_a_cache_that_is_too_small(total_mib: int, model: Model, users: int) -> None:
    if total_mib < 1.2 * model.weights_bytes / 2**20 + 2048:
        return
    found = first(model, total_mib=total_mib, users=str(users))
    needed = conversation_mib(
        model, found.kv_type, found.context, ubatch=launch_of(found).ubatch, checkpoints=launch_of(found).checkpoints
    )
    assert launch_of(found).idle_slots_stay or launch_of(found).cache_ram_mib >= int(needed)
    assert ("--no-cache-idle-slots" in arguments(found, ENGINE, SOCKET)) == launch_of(found).idle_slots_stay


@pytest.mark.parametrize("kv_type", ["q8_0", "auto"])
def test_slots_are_kept_where_a_rounder_cache_of_the_context_asked_for_has_room(kv_type: str) -> None:
    """With f16 the 32,768 tokens do not fit, neither in one slot nor in four."""
    plan = first(PUBLISHED_8B, total_mib=9000, ctx_size="32768", kv_type=kv_type)
    assert (plan.kv_type, plan.parallel) == ("q8_0", 4)
    assert plan.memory.cache >= 128
    with pytest.raises(ModelDoesNotFitError):
        first(PUBLISHED_8B, total_mib=9000, ctx_size="32768", kv_type="f16")
