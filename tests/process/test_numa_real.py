"""The NUMA flags on the real engine. This machine may have one node: what is seen is that the engine takes them."""

from __future__ import annotations

import pytest

from appliance.engines.llama.planning.arguments.launch import NUMA_MODES, launch_of
from tests.process.stages.engine import find_model
from tests.process.stages.slots import serving


@pytest.mark.parametrize("mode", NUMA_MODES)
async def test_an_engine_with_numa_flags_answers(mode: str) -> None:
    async with serving(find_model(), numa=mode, ctx_size="512", parallel="1") as server:
        turn = await server.talk().say("Name a colour.", tokens=4)
    assert launch_of(server.plan).numa == mode
    assert turn.text


async def test_an_engine_whose_threads_are_bound_to_a_nodes_cpus_answers() -> None:
    """A plan for the GPU's node has two CPU masks: one for the threads of decode and one for those of prefill."""
    async with serving(find_model(), change={"cpus": (0,)}, ctx_size="512", threads="1", parallel="1") as server:
        turn = await server.talk().say("Name a colour.", tokens=4)
    assert launch_of(server.plan).cpus == (0,)
    assert turn.text
