"""What the driver tells of the memory that one process of ours holds: the watch of a serving engine goes by it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.probe.gpu.nvidia import query_gpus
from appliance.probe.load.holders import held_mib, own_pids
from appliance.probe.load.processes import query_tree
from appliance.settings import process_environment
from tests.gpu.ballast import held

LEAVE_MIB = 4096
CONTEXT_MIB = 1024  # of CUDA, at most


def test_the_memory_of_a_process_of_our_tree_is_told() -> None:
    environment = process_environment()
    folder = environment.get("APPLIANCE_ENGINE_DIR")
    if not folder:
        pytest.skip("APPLIANCE_ENGINE_DIR names no engine, whose CUDA runtime takes the memory")
    before = query_gpus(Path("/"), environment).gpus[0]
    with held(Path(folder), LEAVE_MIB) as taken:
        gpu = query_gpus(Path("/"), environment).gpus[0]
        pids = own_pids(gpu, query_tree(os.getpid()), before)
    assert pids, f"none of its processes is ours: {gpu.holders}"
    mib = held_mib(gpu, pids)
    assert mib is not None, f"the driver does not say how much: {gpu.holders}"
    assert taken["held_mib"] <= mib <= taken["held_mib"] + CONTEXT_MIB
    lost_mib = (before.vram_free_mib or 0) - (gpu.vram_free_mib or 0)
    print(f"{mib:,} MiB by its process, {lost_mib:,} by what is free")
