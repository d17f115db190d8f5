"""Our compile key against `VllmConfig.compute_hash` of a vLLM image: what moves theirs has to move ours.

As `test_container_vllm_parser`. All configurations together cost one import of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.engines.vllm.planning.arguments.launch import EAGER, compile_key, launch_of
from appliance.plan import Plan
from tests.container.stages.vllm_image import answered, needs_image
from tests.golden.vllm_plans import CASES, space
from tests.shapes.folders import write_folder

HASH = Path(__file__).parent / "stages/vllm_hash.py"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The same thing for vLLM's arguments, for our plan, and for the launch in it."""

    theirs: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    launch: Mapping[str, Any] | None = None

    def of(self, plan: Plan) -> Plan:
        return replace(replace(plan, **self.plan or {}), launch=replace(launch_of(plan), **self.launch or {}))


CHANGES: Mapping[str, Change] = {
    "nothing": Change(theirs={}),
    "context": Change(theirs={"max_model_len": 1024}, plan={"context": 1024}),
    "sequences": Change(theirs={"max_num_seqs": 8}, plan={"parallel": 8}),
    "tokens of a step": Change(theirs={"max_num_batched_tokens": 4096}, launch={"max_num_batched_tokens": 4096}),
    "type of the cache": Change(theirs={"kv_cache_dtype": "fp8"}, plan={"kv_type": "fp8"}),
    "its blocks": Change(theirs={"block_size": 64}, launch={"block_size": 64}),
    "eager": Change(theirs={"enforce_eager": True}, launch={"graph_mode": EAGER, "graph_sizes": ()}),
    "utilization": Change(theirs={"gpu_memory_utilization": 0.5}, launch={"utilization": 0.5}),
    "bytes of the cache": Change(theirs={"kv_cache_memory_bytes": 2**28}, launch={"kv_bytes": 2**28}),
    "prefix caching": Change(theirs={"enable_prefix_caching": False}, launch={"has_prefix_cache": False}),
    "name": Change(theirs={"served_model_name": ["other"]}, plan={"alias": "other"}),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the hash that vLLM gives for each change, keyed by the name of the change."""
    needs_image()
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder / "m", "smollm2-135m")
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    found: dict[str, str] = answered(
        HASH, {name: change.theirs for name, change in CHANGES.items()}, model=folder / "m"
    )
    return found


def compiled_plan() -> Plan:
    """Return a compiled plan. The best plan on the CPU is eager, so it is a neighbour of the best."""
    here = space(next(case for case in CASES if case.machine == "cpu-16g"))
    return next(plan for plan in here.all() if launch_of(plan).graph_mode != EAGER)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "nothing"])
def test_ours_moves_where_theirs_does_and_nowhere_else(name: str, theirs: Mapping[str, str]) -> None:
    plan = compiled_plan()
    moved = compile_key(CHANGES[name].of(plan)) != compile_key(plan)
    assert moved == (theirs[name] != theirs["nothing"])


def test_a_kept_profile_would_be_taken_at_another_utilization(theirs: Mapping[str, str]) -> None:
    """Why VLLM_ENABLE_STARTUP_PLAN stays off: its key has this hash, the card and the ranks, and no utilization."""
    assert theirs["utilization"] == theirs["nothing"] != theirs["context"]
