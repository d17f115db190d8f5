"""Prompts where weights lie in host memory: the ubatch and the way to load are priced by a long prompt."""

from __future__ import annotations

import pytest

from appliance.engines.llama.planning.batch import LONG_PROMPTS
from appliance.engines.llama.planning.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.plan import Plan
from appliance.settings import resolve_settings
from tests.builders import facts, model
from tests.fakes.machines import hardware_of
from tests.unit.engines.llama.planning.test_plan_context import reason, sized


def space(machine: str, **flags: str) -> Space:
    oss = model("gpt-oss-120b", "MXFP4")
    return Space(resolve_settings(flags, {}), *facts(has_cuda=True), hardware_of(machine), oss)


def prefill(plan: Plan) -> float:
    assert plan.speed
    return plan.speed.prefill_tokens_per_s


@pytest.mark.parametrize("machine", ["4090", "5090", "2x4090", "24+8"])
def test_a_long_prompt_is_read_many_times_as_fast_as_with_the_engines_defaults(machine: str) -> None:
    found = space(machine).best
    assert launch_of(found).ubatch >= 2048
    assert launch_of(found).batch >= launch_of(found).ubatch
    assert launch_of(found).load_mode == "none"
    usual = space(machine, ubatch="512", load_mode="mmap").best
    assert prefill(found) > 4 * prefill(usual)
    assert found.speed
    assert usual.speed
    assert found.speed.decode_tokens_per_s > 0.8 * usual.speed.decode_tokens_per_s


def test_the_words_say_what_each_of_both_brings() -> None:
    found = space("4090").best
    assert f"a prompt of 4,096 tokens is read at {prefill(found):,.0f} tok/s, with 512 at " in reason(found, "ubatch")
    assert f"read at {prefill(found):,.0f} tok/s, from mapped pages at " in reason(found, "load_mode")


def test_the_buffer_of_a_larger_ubatch_is_counted() -> None:
    large, usual = space("4090").best, space("4090", ubatch="512").best
    (more,), (less,) = large.placement.shares, usual.placement.shares
    assert more.memory.compute > less.memory.compute + 200
    assert more.memory.total <= more.gpu.free_mib
    assert large.placement.cpu_expert_layers > usual.placement.cpu_expert_layers


def test_what_is_asked_for_stays() -> None:
    found = space("4090", ubatch="1024", load_mode="mmap").best
    assert (launch_of(found).ubatch, launch_of(found).load_mode) == (1024, "mmap")


def test_the_workload_decides_how_long_a_prompt_is() -> None:
    sizes = [launch_of(space("24+8", workload=jobs).best).ubatch for jobs in LONG_PROMPTS]
    assert sizes == sorted(sizes)
    assert "a prompt of 16,384 tokens" in reason(space("24+8", workload="document").best, "ubatch")
    assert "a prompt of 6,144 tokens" in reason(space("24+8", workload="chat:1,agent:1").best, "ubatch")


def test_with_everything_on_gpus_nothing_is_copied() -> None:
    found = Space(resolve_settings({}, {}), *facts(has_cuda=True), hardware_of("4090"), sized("8b")).best
    assert (launch_of(found).ubatch, launch_of(found).load_mode) == (512, "mmap")
    assert "llama.cpp's default" in reason(found, "ubatch")


def test_the_tuner_may_measure_mapped_weights_beside_it_and_no_smaller_batches() -> None:
    """Its prompts are too short to tell what those cost."""
    found = space("4090").all()
    assert {launch_of(plan).load_mode for plan in found} == {"none", "mmap"}
    assert {launch_of(plan).ubatch for plan in found} == {4096}
    assert {launch_of(plan).ubatch for plan in space("4090", ubatch="512").all()} == {512}
    best = found[0]
    assert best.speed
    for plan in found:
        assert plan.speed
        if launch_of(plan).load_mode == "mmap" and plan.placement == best.placement:
            assert plan.speed.prefill_tokens_per_s < best.speed.prefill_tokens_per_s


def test_memory_that_gpu_and_host_share_is_not_filled_with_pages_of_the_file() -> None:
    found = space("gb10").best
    assert launch_of(found).load_mode == "dio"
    assert "GPU and host share one memory" in reason(found, "load_mode")
    assert launch_of(space("gb10", load_mode="mmap", ctx_size="8192").best).load_mode == "mmap"


def test_a_mapped_file_takes_its_room_in_shared_memory_beside_the_weights() -> None:
    mapped, past = (space("gb10", load_mode=mode, ctx_size="8192").best for mode in ("mmap", "auto"))
    (of_mapped,), (of_past,) = mapped.placement.shares, past.placement.shares
    assert of_mapped.memory.total <= of_mapped.gpu.free_mib < of_past.gpu.free_mib - 60_000
