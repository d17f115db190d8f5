from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.decide import CUT_WORTH
from appliance.engines.llama.planning.memory.kv_types import BELOW_Q8, TRUSTED
from appliance.engines.llama.planning.memory.memory import KV_BYTES, compute_mib, kv_bytes_per_token, kv_mib, output_mib
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.server import arguments
from appliance.errors import ConfigError, ModelDoesNotFitError, ModelUnreadableError
from appliance.model import Model
from appliance.plan import Plan, as_document, explain, k_and_v, with_launch, with_measured
from appliance.probe import Hardware
from appliance.settings import resolve_settings
from tests.builders import ENGINE, IMAGE, LARGE, SMALL, machine


def first(model: Model = SMALL, hardware: Hardware | None = None, **flags: str) -> Plan:
    return Space(resolve_settings(flags, {}), IMAGE, ENGINE, hardware or machine(), model).best


def reason(found: Plan, name: str) -> str:
    return next(choice.reason for choice in found.choices if choice.name == name)


def test_types_are_considered_from_the_most_exact_to_the_smallest() -> None:
    assert BELOW_Q8 == ("q8_0/q4_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0")
    sizes = [sum(KV_BYTES[each] for each in k_and_v(kind)) for kind in (*TRUSTED, *BELOW_Q8)]
    assert sorted(sizes[:2] + sizes[3:], reverse=True) == sizes[:2] + sizes[3:]
    for kind in KV_BYTES:
        assert resolve_settings({"kv_type": kind}, {}).kv_type == kind


@pytest.mark.parametrize(
    ("asked", "there"), [("q8_O", ENGINE.kv_types), ("fp8", ENGINE.kv_types), ("q9_9", ("f16", "q9_9"))]
)
def test_a_type_that_this_engine_or_the_planner_does_not_know_is_10(asked: str, there: tuple[str, ...]) -> None:
    engine = replace(ENGINE, kv_types=there)
    with pytest.raises(
        ConfigError, match=rf"kv_type is not offered by this engine: '{asked}' \(flag --kv-type\)"
    ) as error:
        _ = Space(resolve_settings({"kv_type": asked}, {}), IMAGE, engine, machine(), SMALL).best
    assert "f16" in (error.value.hint or "")
    assert f" {asked}" not in (error.value.hint or "")
    assert ("perhaps you meant 'q8_0'; " in (error.value.hint or "")) == (asked == "q8_O")


@pytest.mark.parametrize("asked", ["", "q8 0", "q8_0/", "/q4_0", "q8_0/q4_0/q4_0", "auto/q8_0", "q8_0/auto", "q8_0\n"])
def test_what_is_no_word_is_no_type(asked: str) -> None:
    with pytest.raises(ConfigError, match="setting kv_type is no type, or two as in q8_0/q4_0"):
        resolve_settings({"kv_type": asked}, {})


def test_kv_bytes_are_the_published_ones() -> None:
    assert kv_bytes_per_token(SMALL, "f16") == 30 * 3 * 128 * 2  # 180 MiB at 8,192: as llama-server's log says
    assert kv_mib(SMALL, "f16", 8192) == 180.0
    assert kv_mib(SMALL, "q8_0", 8192) == pytest.approx(95.62, abs=0.01)  # its log, again
    assert kv_bytes_per_token(LARGE, "f16") == 131072


@pytest.mark.parametrize(
    ("ubatch", "context", "logged"),
    [
        (128, 1024, 3.44),
        (512, 1024, 13.76),
        (1024, 1024, 27.52),
        (128, 8192, 3.88),
        (512, 8192, 15.51),
        (2048, 8192, 62.05),
    ],
)
def test_compute_buffer_is_an_upper_bound_of_what_was_logged(ubatch: int, context: int, logged: float) -> None:
    """llama-server b11312 at -lv 4 with SmolLM2-135M, flash attention on: "CPU compute buffer size"."""
    assert logged <= compute_mib(SMALL, ubatch, context) <= 2 * logged + 1


def test_output_buffer_is_one_row_of_logits_a_slot() -> None:
    assert output_mib(SMALL, 4) == 0.75  # logged


def test_native_context_when_it_fits() -> None:
    found = first()
    assert found.context == 8192
    assert found.kv_type == "f16"
    assert "native length" in reason(found, "context")


def test_a_native_context_that_is_no_multiple_of_the_padding_is_not_exceeded() -> None:
    assert first(replace(SMALL, native_context=1000)).context == 1000
    assert first(replace(SMALL, native_context=100)).context == 100


def test_an_embedding_model_is_started_as_one() -> None:
    found = first(replace(SMALL, is_embedding_model=True))
    assert "--embeddings" in arguments(found, ENGINE, Path("/tmp/e.sock"))
    assert "--embeddings" not in arguments(first(), ENGINE, Path("/tmp/e.sock"))


def test_what_was_measured_is_taken_into_the_plan_of_this_start() -> None:
    measured = with_measured(
        with_launch(first(), threads=2, threads_batch=2, ubatch=256), "best of 4 measured", [first()]
    )
    moved = replace(SMALL, path=Path("/data/models/moved.gguf"))
    now = Space(resolve_settings({}, {}), IMAGE, ENGINE, machine(limit_mib=1200), moved)
    found = now.now(measured)
    assert isinstance(found, Plan)
    assert (launch_of(found).threads, launch_of(found).threads_batch, launch_of(found).ubatch) == (2, 2, 256)
    assert (found.model_path, found.alias) == ("/data/models/moved.gguf", "moved")
    assert reason(found, "ubatch") == "best of 4 measured"
    assert found.memory.compute == measured.memory.compute
    assert found.usable_mib < 1200
    assert launch_of(found).cache_ram_mib < launch_of(measured).cache_ram_mib
    assert str(launch_of(found).cache_ram_mib) in next(c.value for c in found.choices if c.name == "cache_ram_mib")


def test_context_shrinks_to_what_the_limit_carries_and_names_it() -> None:
    found = first(LARGE, machine(limit_mib=12288), fill_minutes="0")
    assert 32768 <= found.context < LARGE.native_context
    assert found.kv_type == "f16"
    assert found.memory.total <= 12288 - 50
    assert "memory limit of this container: 12,288 MiB" in explain(found)


def test_q8_0_buys_a_larger_window_when_f16_carries_little() -> None:
    found = first(LARGE, machine(limit_mib=7000), fill_minutes="0")
    assert found.kv_type == "q8_0"
    assert "f16 would carry only" in reason(found, "kv_type")
    assert found.context > 8192


def test_heads_that_no_block_divides_are_kept_exact() -> None:
    odd = replace(LARGE, key_length=80, value_length=80, stack=())
    assert first(odd, machine(limit_mib=7000)).kv_type == "f16"
    with pytest.raises(ConfigError, match=r"not suit this model: 'q8_0' \(flag --kv-type\), whose heads of 80"):
        first(odd, kv_type="q8_0")


def test_a_model_whose_cache_outweighs_it_keeps_the_exact_type() -> None:
    tiny = replace(SMALL, weights_bytes=2_000_000)  # then reading q8_0 instead of f16 nearly halves the time of a token
    assert first(tiny).kv_type == "f16"
    assert first(tiny, ctx_size="4096").kv_type == "f16"


def test_weights_beyond_the_limit_are_refused_with_figures() -> None:
    with pytest.raises(ModelDoesNotFitError) as caught:
        first(LARGE, machine(limit_mib=4096))
    assert caught.value.exit_code == 31
    assert "4,692 weights" in caught.value.message
    assert "memory limit of this container: 4,096 MiB" in caught.value.message
    assert "--allow-disk" in (caught.value.hint or "")


def test_the_prompt_cache_shrinks_before_the_context_that_clients_need() -> None:
    """Where both just fitted, a context of 256 was served beside a prompt cache of 128 MiB, and more with less room."""
    found = [first(hardware=machine(limit_mib=limit)) for limit in range(300, 740, 20)]
    contexts = [plan.context for plan in found]
    assert contexts == sorted(contexts)
    assert contexts[-1] == SMALL.native_context
    assert all(launch_of(plan).cache_ram_mib <= 1 for plan in found if plan.context < SMALL.native_context)
    assert any(1 < launch_of(plan).cache_ram_mib < 128 for plan in found)


def test_a_prompt_cache_that_was_asked_for_is_named_where_it_leaves_no_room() -> None:
    with pytest.raises(ModelDoesNotFitError) as caught:
        first(cache_ram_mib="999999")
    assert "999,999 prompt cache" in caught.value.message
    assert (caught.value.hint or "").startswith("use a smaller --cache-ram-mib, a smaller model")


def test_allow_disk_overrides_that() -> None:
    found = first(LARGE, machine(limit_mib=4096), allow_disk="on")
    assert found.context == 4096
    assert "--allow-disk is on" in reason(found, "context")


def test_context_asked_for_beyond_memory_is_refused() -> None:
    with pytest.raises(ModelDoesNotFitError, match="needs"):
        first(LARGE, machine(limit_mib=7000), ctx_size="131072", kv_type="f16")


@pytest.mark.parametrize(
    ("logical", "physical", "quota", "threads"),
    [(8, 4, None, 4), (8, 4, 2.0, 2), (8, 4, 0.5, 1), (2, 2, 1.5, 1), (16, 16, 6.9, 6)],
)
def test_threads_never_exceed_the_quota(logical: int, physical: int, quota: float | None, threads: int) -> None:
    hardware = machine(logical=logical, physical=physical, quota=quota)
    here = Space(resolve_settings({}, {}), IMAGE, ENGINE, hardware, SMALL)
    assert launch_of(here.best).threads == threads
    assert max(launch_of(each).threads for each in here.all()) == hardware.cpu.threads_max


@pytest.mark.parametrize(
    ("logical", "physical", "quota", "threads", "reading"),
    [(2, 2, None, 2, 2), (2, 2, 1.5, 1, 2), (2, 2, 1.2, 1, 1), (8, 8, 2.5, 2, 3), (8, 8, 6.9, 6, 6), (8, 1, 1.5, 1, 1)],
)
def test_prompts_are_read_with_one_more_thread_where_that_fills_the_quota(
    logical: int, physical: int, quota: float | None, threads: int, reading: int
) -> None:
    found = first(hardware=machine(logical=logical, physical=physical, quota=quota))
    assert (launch_of(found).threads, launch_of(found).threads_batch) == (threads, reading)
    assert ("read prompts" in reason(found, "threads")) == (reading > threads)


def test_threads_asked_for_also_read_prompts() -> None:
    found = first(hardware=machine(logical=2, physical=2, quota=1.5), threads="1")
    assert launch_of(found).threads_batch == 1


def test_threads_asked_for_are_held_at_the_quota_and_said() -> None:
    found = first(hardware=machine(quota=2.0), threads="8")
    assert launch_of(found).threads == 2
    assert "asked for (8), held at what this container may use" in reason(found, "threads")


def test_prompt_cache_is_sized_and_never_off_by_itself() -> None:
    assert launch_of(first()).cache_ram_mib > 1000
    assert launch_of(first(LARGE, machine(limit_mib=7000))).cache_ram_mib >= 128
    assert launch_of(first(cache_ram_mib="0")).cache_ram_mib == 0


def test_mlock_beyond_the_limit_is_reported_and_not_fatal() -> None:
    found = first(load_mode="mmap+mlock")
    assert launch_of(found).load_mode == "mmap"
    assert "only 8 MiB may be locked" in reason(found, "load_mode")
    generous = machine()
    generous = replace(generous, memory=replace(generous.memory, memlock_limit_mib=None))
    assert launch_of(first(hardware=generous, load_mode="mmap+mlock")).load_mode == "mmap+mlock"


def test_kv_type_that_the_engine_lacks_is_refused() -> None:
    engine = replace(ENGINE, kv_types=("f16",))
    with pytest.raises(ConfigError, match="not offered by this engine: 'q4_0'"):
        Space(resolve_settings({"kv_type": "q4_0"}, {}), IMAGE, engine, machine(), SMALL)


def test_cache_that_cannot_be_reckoned_is_refused_and_not_guessed() -> None:
    with pytest.raises(ModelUnreadableError, match="keeps a state"):
        first(replace(SMALL, cache_kind="unsupported", cache_reason="a state-space layer keeps a state"))


def test_every_choice_has_a_reason_and_a_source() -> None:
    for choice in first().choices:
        assert choice.reason, choice.name
        assert choice.source, choice.name


def test_documents_are_json() -> None:
    assert json.loads(json.dumps(as_document(first())))["memory"]["total"] > 0


memories = st.integers(600, 65536)


@pytest.mark.thorough
@given(memories, st.sampled_from([SMALL, LARGE]), st.integers(1, 64), st.one_of(st.none(), st.floats(0.1, 64)))
def test_what_is_planned_fits_and_is_the_same_every_time(
    limit_mib: int, model: Model, logical: int, quota: float | None
) -> None:
    hardware = machine(
        total_mib=131072, limit_mib=limit_mib, logical=logical, physical=max(1, logical // 2), quota=quota
    )
    settings = resolve_settings({}, {})
    try:
        plans = Space(settings, IMAGE, ENGINE, hardware, model).all()
    except ModelDoesNotFitError:
        return
    assert plans == Space(settings, IMAGE, ENGINE, hardware, model).all()
    for found in plans:
        assert found.memory.total <= hardware.memory.usable_mib
        assert found.context <= model.native_context
        assert 1 <= launch_of(found).threads <= hardware.cpu.threads_max
        assert launch_of(found).batch >= launch_of(found).ubatch


@given(memories, memories)
@example(6412, 6512)  # 8,448 tokens are read in little more than the time for 8,192, and are not cut
def test_more_memory_never_gives_a_smaller_context(one: int, other: int) -> None:
    """Within a tenth: a context that is too long to be filled is cut, unless little is gained."""
    less, more = sorted((one, other))

    def context(limit_mib: int) -> int:
        try:
            return first(LARGE, machine(total_mib=131072, limit_mib=limit_mib), kv_type="f16").context
        except ModelDoesNotFitError:
            return 0

    assert CUT_WORTH * context(less) <= context(more)


def test_measuring_becomes_the_reason_unless_the_value_was_asked_for() -> None:
    others = [first(), with_launch(first(), threads=1)]
    found = with_measured(with_launch(first(), threads=2, ubatch=256), "best of 4 measured", others)
    told = {c.name: (c.value, c.reason, c.source) for c in found.choices}
    assert told["threads"] == ("2", "best of 4 measured", "measured")
    assert told["ubatch"] == ("256", "best of 4 measured", "measured")
    assert reason(with_measured(first(threads="2"), "best of 4 measured", others), "threads") == "asked for"


def test_a_value_that_was_the_same_in_all_that_was_measured_keeps_its_reason() -> None:
    others = [with_launch(first(), ubatch=128), with_launch(first(), ubatch=256)]
    found = with_measured(others[1], "best of 2 measured", others)
    assert reason(found, "ubatch") == "best of 2 measured"
    for name in ("threads", "load_mode"):
        assert reason(found, name) == reason(first(), name)


def test_without_a_gpu_the_speed_is_told_with_how_far_off_such_predictions_were() -> None:
    assert "tok/s of decode" in explain(first(LARGE))
    assert "times" not in reason(first(LARGE), "speed")
    assert "1.9 times too high" in reason(first(SMALL), "speed")
    arm = replace(machine(), cpu=replace(machine().cpu, isa=("asimd", "asimddp", "i8mm")))
    assert "4.6 times as long" in reason(first(LARGE, arm), "speed")
