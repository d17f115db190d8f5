"""Plans and command lines of vLLM for chosen machines and models as text, one file each, compared by a test.

python -m tests.golden.vllm_plans    writes tests/golden/vllm/*.txt anew: read the difference before keeping it
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from appliance.engines import cells
from appliance.engines.engine import Inputs, Install, Node
from appliance.engines.vllm.planning.arguments.launch import launch_of
from appliance.engines.vllm.planning.space import Space
from appliance.engines.vllm.process import server
from appliance.errors import FatalError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model
from appliance.plan import Kernels, Plan, explain
from appliance.probe import Hardware
from appliance.settings import resolve_settings
from tests.fakes.machines import hardware_of
from tests.golden.files import wrapped, write_anew
from tests.golden.machines import MACHINES
from tests.shapes.folders import folder_model

HERE = Path(__file__).parent / "vllm"
DATA = Path(__file__).parents[1] / "data/vllm"
SOCKET = Path("/tmp/engine.sock")
# As `ImageFacts` of the cell would say it: native and by JIT.
SMS = ("75", "80", "86", "89", "90a", "100a", "103a", "120a", "121a")
SHM_MIB = 16384


@dataclass(frozen=True, kw_only=True)
class Case:
    machine: str
    model: str
    flags: Mapping[str, str] = field(default_factory=dict)
    name: str = ""

    @property
    def id(self) -> str:
        return self.name or f"{self.machine}_{self.model}"


# A user of RTX 2080 Ti cards: published as TP 2, half, 262,144 tokens, one sequence, MTP 3, with an fp8 cache on 0.21.
PUBLISHED = {"parallel": "1", "mmproj": "off", "speculation": "mtp"}
GROUP = {"nodes": "2", "leader": "10.0.0.1"}
CASES = (
    Case(machine="cpu-16g", model="smollm2-135m"),
    Case(machine="cpu-limit-8g", model="smollm2-135m", flags={"threads": "4", "parallel": "2"}),
    Case(machine="cpu-16g", model="qwen3-8b"),
    Case(machine="t4", model="qwen3-8b-fp8"),
    Case(machine="2x2080ti-22g", model="qwen3.6-27b-awq"),
    Case(machine="2x2080ti-22g", model="qwen3.6-27b-awq", flags=PUBLISHED, name="2x2080ti-22g_as-published"),
    Case(
        machine="2x2080ti-22g",
        model="qwen3.6-27b-awq",
        flags={**PUBLISHED, "ctx_size": "262144"},
        name="2x2080ti-22g_as-published_262144",
    ),
    Case(machine="4x2080ti-22g", model="qwen3.6-27b-awq", flags=PUBLISHED, name="4x2080ti-22g_as-published"),
    Case(
        machine="2x2080ti-22g",
        model="qwen3.6-27b-awq",
        flags={**PUBLISHED, "kv_type": "fp8_e4m3"},
        name="2x2080ti-22g_fp8-cache",
    ),
    Case(
        machine="2x2080ti-22g",
        model="qwen3.6-27b-awq",
        flags={**PUBLISHED, "ctx_size": "262144", "kv_type": "int8_per_token_head"},
        name="2x2080ti-22g_int8-cache_262144",
    ),
    Case(machine="4x2080ti-22g", model="qwen3.6-27b-awq"),
    Case(machine="4x2080ti-22g", model="llama-3.3-70b-awq"),
    Case(machine="1x4090", model="qwen3-8b-fp8"),
    Case(
        machine="1x4090",
        model="qwen3-8b-fp8",
        flags={"ctx_size": "131072", "rope_scaling": "yarn", "kv_type": "fp8"},
        name="1x4090_qwen3-8b-fp8_yarn",
    ),
    Case(machine="1x4090", model="qwen3-8b-nvfp4"),
    Case(machine="gb10", model="qwen3-8b-nvfp4"),
    Case(machine="2x4090", model="llama-3.3-70b-gptq"),
    Case(machine="h100", model="llama-3.3-70b-gptq", flags={"users": "40", "workload": "agent"}),
    Case(machine="2x4090", model="gemma-3-12b"),
    Case(machine="4070+3060", model="qwen3-8b-fp8"),
    Case(machine="24+8", model="gemma-3-12b", flags={"mmproj": "off"}),
    Case(machine="a100-80g", model="qwen3-30b-a3b"),
    Case(machine="a100-80g", model="deepseek-v2-lite"),
    Case(machine="h200", model="qwen3-30b-a3b"),
    Case(machine="h200", model="qwen3.6-27b-awq", flags={"speculation": "ngram"}),
    Case(machine="3090+4090+5060", model="llama-3.3-70b-awq"),
    Case(
        machine="2x4090",
        model="qwen3-8b",
        flags={"engine_arg": "--tensor-parallel-size 1 --gpu-memory-utilization 0.8 --trust-remote-code"},
        name="2x4090_own-values",
    ),
    Case(machine="8xh100", model="llama-3.3-70b-awq", flags=GROUP, name="2x8xh100_llama-3.3-70b-awq"),
    Case(machine="2x4090", model="llama-3.3-70b-awq", flags=GROUP, name="2x2x4090_llama-3.3-70b-awq"),
    Case(machine="2x4090", model="gemma-3-12b", flags=GROUP, name="2x2x4090_gemma-3-12b"),
)


def hardware(name: str) -> Hardware:
    made: Mapping[str, Callable[[], Hardware]] = {
        "1x4090": partial(_first, "2x4090", 1),
        "a100-80g": _whole_a100,
        "8xh100": _eight_h100,
    }
    found = made[name]() if name in made else MACHINES[name]
    if not found.gpus.gpus:
        return found
    return replace(found, memory=replace(found.memory, shm_mib=SHM_MIB))


def _first(name: str, cards: int) -> Hardware:
    found = hardware_of(name)
    return replace(found, gpus=replace(found.gpus, gpus=found.gpus.gpus[:cards]))


def _eight_h100() -> Hardware:
    """Return a machine of eight H100 that are all linked by NVLink."""
    found = hardware_of("h100")
    (card,) = found.gpus.gpus
    cards = tuple(
        replace(card, index=at, uuid=f"GPU-{at}", nvlink_peers=tuple(peer for peer in range(8) if peer != at))
        for at in range(8)
    )
    return replace(found, gpus=replace(found.gpus, gpus=cards))


def _whole_a100() -> Hardware:
    """Return a machine with one A100 that is not divided into slices."""
    found = hardware_of("h200")
    card = replace(
        found.gpus.gpus[0],
        name="NVIDIA A100-SXM4-80GB",
        sm="80",
        vram_total_mib=81920,
        vram_free_mib=81000,
        sm_count=108,
        bandwidth_gb_s=2039.0,
    )
    return replace(found, gpus=replace(found.gpus, gpus=(card,)))


@cache
def engine_facts(release: str = "0.33") -> EngineFacts:
    """Return the facts that an image of this release reported: vllm-cpu for 0.32, vllm-cu130 for 0.33."""
    return cells.engine_facts(cells.find_cell({"0.32": "vllm-cpu", "0.33": "vllm-cu130"}[release]))


def image(machine: Hardware) -> ImageFacts:
    has_gpu = bool(machine.gpus.gpus)
    return ImageFacts(
        build_id="b1",
        cell="vllm-cu130" if has_gpu else "vllm-cpu",
        engine="vllm",
        engine_version="0.33.0",
        engine_build=0,
        engine_commit="4ba787ec9",
        cuda="13.0" if has_gpu else None,
        sm=SMS if has_gpu else (),
    )


def inputs(
    machine: Hardware, model: Model, flags: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> Inputs:
    settings = resolve_settings({"alias": model.path.name, **flags}, environment or {})
    return Inputs(
        settings=settings,
        image=image(machine),
        facts=engine_facts(),
        hardware=machine,
        model=model,
        kernels=Kernels(variant=None, isa=machine.cpu.isa),
    )


def space(case: Case) -> Space:
    return Space(inputs(hardware(case.machine), folder_model(case.model), case.flags))


def arguments(plan: Plan, node: Node | None = None) -> tuple[str, ...]:
    return server.arguments(plan, engine_facts(), SOCKET, node)


def environment(plan: Plan, node: Node | None = None) -> dict[str, str]:
    """Return the whole environment that vLLM is started with."""
    facts = engine_facts()
    install = Install(engine_dir=Path("/opt/vllm"), facts=facts, cache_dir=Path("/data/cache/golden"), node=node)
    return server.environment(plan, install, server.scratch_of(SOCKET))


def variables(plan: Plan, node: Node | None = None) -> dict[str, str]:
    """Return the environment variables that a plan decides."""
    shown = ("CUDA_VIS", "OMP", "VLLM_CPU", "VLLM_PP", *(("VLLM_HOST_IP",) if node else ()))
    return {name: value for name, value in environment(plan, node).items() if name.startswith(shown)}


def nodes_of(plan: Plan) -> tuple[Node | None, ...]:
    """Return one node for each host of the plan; (None,) if one host serves alone."""
    count = launch_of(plan).nodes
    if count == 1:
        return (None,)
    made = (
        Node(nodes=count, rank=at, address=f"10.0.0.{at + 1}", leader="10.0.0.1", port=29501) for at in range(count)
    )
    return tuple(made)


def text(case: Case) -> str:
    asked = "".join(f", {name} {value}" for name, value in case.flags.items())
    head = f"{case.model} on {case.machine}{asked}"
    try:
        plan = space(case).predicted
    except FatalError as error:
        return f"{head}\n\n{wrapped(f'error {error.exit_code}: {error.message}')}\n{wrapped(f'hint: {error.hint}')}\n"
    lines = [wrapped(line, indent="    ") for line in explain(plan).splitlines()]
    shown = [command_line(plan, node) for node in nodes_of(plan)]
    speed = f"predicted for the chat job, from bandwidths: {plan.speed.describe()}" if plan.speed else ""
    return "\n".join((head, "", *lines, "", speed, "", *(wrapped(line, indent="    ") for line in shown), ""))


def command_line(plan: Plan, node: Node | None) -> str:
    words = [f"{name}={value}" for name, value in variables(plan, node).items()]
    return " ".join([*words, "vllm", *map(shlex.quote, arguments(plan, node))])


def main() -> None:
    write_anew(HERE, {case.id: text(case) for case in CASES})


if __name__ == "__main__":
    main()
