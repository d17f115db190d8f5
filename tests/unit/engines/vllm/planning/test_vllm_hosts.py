"""One model over several hosts: ranks, memory, what each host is started with, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines.engine import Host, Install, Node
from appliance.engines.vllm.planning.space import Space
from appliance.engines.vllm.process import server
from appliance.errors import ConfigError
from appliance.plan import Plan
from appliance.probe import Gpu
from tests.golden.vllm_plans import SOCKET, arguments, engine_facts, hardware, inputs
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import CPU, best, launch, reason

PAIR = "2x4090"
MODEL = "llama-3.3-70b-awq"
GROUP = {"nodes": "2", "leader": "10.0.0.1"}


def card(**changes: object) -> Gpu:
    return replace(hardware(PAIR).gpus.gpus[0], **changes)  # type: ignore[arg-type]


def with_hosts(*hosts: Host, model: str = MODEL, **flags: str) -> Plan:
    given = inputs(hardware(PAIR), folder_model(model), {**GROUP, "nodes": str(1 + len(hosts)), **flags})
    return Space(replace(given, hosts=hosts)).best


def far(*gpus: Gpu, shm_mib: int | None = None) -> Host:
    return Host(name="10.0.0.2", gpus=gpus, shm_mib=shm_mib)


def node(rank: int, **changes: object) -> Node:
    made = Node(nodes=2, rank=rank, address=f"10.0.0.{rank + 1}", leader="10.0.0.1", port=29501)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_smallest_host_and_the_smallest_card_decide() -> None:
    small = card(uuid="GPU-far", vram_free_mib=20000)
    plan = with_hosts(far(small), model="gemma-3-12b")
    assert (launch(plan).tensor_parallel, launch(plan).pipeline_parallel, launch(plan).nodes) == (1, 2, 2)
    near, distant = launch(plan).stage_layers
    assert near > distant
    assert (launch(plan).utilization or 1.0) < 20000 / 24564
    assert [share.gpu.id for share in plan.placement.shares][-1] == "GPU-far"


def test_each_host_is_given_its_own_cards_and_address() -> None:
    plan = with_hosts(far(card(uuid="GPU-a"), card(uuid="GPU-b", index=1)))
    facts = engine_facts()
    found = [
        server.environment(
            plan,
            Install(engine_dir=Path("/opt/vllm"), facts=facts, cache_dir=Path("/c"), node=node(rank)),
            server.scratch_of(SOCKET),
        )
        for rank in range(2)
    ]
    own = [share.gpu.id for share in plan.placement.shares]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == [",".join(own[:2]), "GPU-a,GPU-b"]
    assert [each["VLLM_HOST_IP"] for each in found] == ["10.0.0.1", "10.0.0.2"]
    leader, follower = (arguments(plan, node(rank)) for rank in range(2))
    differing = [
        (a, b) for a, b in zip(leader, [word for word in follower if word != "--headless"], strict=True) if a != b
    ]
    assert differing == [("0", "1")]


def test_the_network_s_variables_of_each_host_reach_its_engine() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "HOME": "/root"}
    install = Install(
        engine_dir=Path("/opt/vllm"), facts=engine_facts(), cache_dir=Path("/c"), node=node(1, environment=given)
    )
    found = server.environment(with_hosts(far(card()), model="gemma-3-12b"), install, server.scratch_of(SOCKET))
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("eth1", "eth1")
    assert found["HOME"] == "/c/home"


def test_the_network_s_variables_of_one_host_are_not_the_other_s() -> None:
    found = best(PAIR, MODEL, {"NCCL_SOCKET_IFNAME": "eth1"}, **GROUP)
    assert launch(found).variables == ()
    assert "every host has its own" in reason(found, "network")


def test_hosts_that_have_not_joined_are_taken_to_be_alike() -> None:
    plan = best(PAIR, MODEL, **GROUP)
    assert len(plan.placement.shares) == 4
    assert "taken to be as this one" in reason(plan, "nodes")
    joined = with_hosts(far(card(), card()))
    assert "taken to be" not in reason(joined, "nodes")
    assert "not encrypted" in reason(joined, "nodes")


def test_a_plan_of_a_group_is_found_again_on_its_hosts() -> None:
    given = inputs(hardware(PAIR), folder_model(MODEL), GROUP)
    here = Space(replace(given, hosts=(far(card(uuid="GPU-a"), card(uuid="GPU-b")),)))
    again = here.now(here.best)
    assert isinstance(again, Plan)
    assert [share.gpu.id for share in again.placement.shares] == [share.gpu.id for share in here.best.placement.shares]
    assert launch(again).nodes == 2


def test_each_host_of_cpus_has_one_stage_and_its_memory_counts_once() -> None:
    alone, group = best(CPU, "smollm2-135m"), best(CPU, "smollm2-135m", **GROUP)
    assert (launch(group).pipeline_parallel, launch(group).stage_layers) == (2, (15, 15))
    assert group.memory.weights < alone.memory.weights
    assert "die of its first request" in reason(group, "placement")


def test_shared_memory_of_every_host_counts() -> None:
    with pytest.raises(ConfigError) as caught:
        with_hosts(far(card(), card(), shm_mib=64))
    assert "64 MiB in /dev/shm" in caught.value.message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine_arg": "--pipeline-parallel-size 3"}, "3 stages (flag --engine-arg) on 2 hosts"),
        ({"engine_arg": "--tensor-parallel-size 4"}, "4 ranks on each host"),
        ({"nodes": "64"}, "64 hosts (flag --nodes), and the model has"),
        ({"engine_arg": "--nnodes 2"}, "the setting nodes stands for"),
        ({"engine_arg": "--headless"}, "cannot be given: --headless"),
    ],
)
def test_what_a_group_cannot_be_is_refused(flags: dict[str, str], words: str) -> None:
    model = "smollm2-135m" if "nodes" in flags else MODEL
    with pytest.raises(ConfigError) as caught:
        best(PAIR, model, **{**GROUP, **flags})
    assert words in caught.value.message
    assert caught.value.hint


def test_unlike_chips_are_refused_with_both_named() -> None:
    with pytest.raises(ConfigError) as caught:
        with_hosts(far(card(sm="86"), card(sm="86")))
    assert "SM 86, SM 89" in caught.value.message
    assert "replicas" in (caught.value.hint or "")
