"""NUMA nodes that a plan's threads run on if weights lie in host memory. Pure.

llama.cpp has three modes (`--numa`; ggml-cpu.c, set_numa_thread_affinity). `distribute` assigns threads to the nodes
one by one. `isolate` keeps them on the node that the engine happens to start on. `numactl` keeps them on the CPUs that
the engine was started with. No mode knows the GPU's node, so an affinity mask binds threads to it. The kernel places
memory on the node of the thread that touches it first.
"""

from __future__ import annotations

from appliance.engines.llama.planning.arguments.launch import NODE, NUMA_MODES
from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts
from appliance.plan import Placement
from appliance.plan.parts.choice import Choice
from appliance.probe import Hardware, NumaNode
from appliance.settings import Settings
from appliance.values import dataclass

FLAG, MASK_FLAG = "--numa", "--cpu-mask"
# Mask of the threads that read prompts: with --threads-batch they no longer take the mask of --cpu-mask.
BATCH_MASK_FLAG = "--cpu-mask-batch"
OFF = "off"
NOT_TOLD = "predicted speeds do not distinguish NUMA modes, measuring does"
NODE_SHARE = 0.9  # share of a node's memory that weights may fill


@dataclass(frozen=True, kw_only=True)
class Numa:
    """NUMA mode of a plan, with the reason for it."""

    mode: str | None  # None: the machine has one node
    cpus: tuple[int, ...] = ()  # CPUs of the GPU's node; empty: threads may run on all
    threads_max: int | None = None  # cores of those CPUs; None: no limit
    choice: Choice | None = None


def check_numa(settings: Settings, engine: EngineFacts) -> None:
    if settings.numa in NUMA_MODES and FLAG not in engine.flags:
        message = f"setting numa is not offered by this engine: '{settings.numa}' ({settings.sources['numa']})"
        raise ConfigError(message, hint="use auto or off")


def usable_nodes(hardware: Hardware) -> tuple[NumaNode, ...]:
    """Return the nodes that have CPUs; empty if there is one, or if this process may use no more CPUs than one has."""
    nodes = tuple(node for node in hardware.numa if node.cpus)
    largest = max((len(node.cpus) for node in nodes), default=0)
    return nodes if len(nodes) > 1 and hardware.cpu.logical > largest else ()


def numa_modes(
    settings: Settings, engine: EngineFacts, hardware: Hardware, placement: Placement, host_mib: float
) -> tuple[Numa, ...]:
    """Return the NUMA modes to try, the predicted one first. `host_mib` is the size of the weights in host memory."""
    if settings.numa in NUMA_MODES:
        return (Numa(mode=settings.numa, choice=_said(settings.numa, "asked for", settings.sources["numa"])),)
    nodes = usable_nodes(hardware)
    if not nodes or settings.numa == OFF or placement.is_whole:
        return (Numa(mode=OFF if nodes else None),)
    near = _near_gpus(hardware, engine, placement, nodes, host_mib)
    spread = _spread(nodes) if FLAG in engine.flags else None
    off = Numa(mode=OFF, choice=_said(OFF, "the kernel places threads; measured with the other modes"))
    isolated = Numa(mode="isolate", choice=_said("isolate", "threads on one node; measured with the other modes"))
    found = (near, spread, off, isolated if spread else None)
    return tuple(numa for numa in found if numa is not None)


def _near_gpus(
    hardware: Hardware, engine: EngineFacts, placement: Placement, nodes: tuple[NumaNode, ...], host_mib: float
) -> Numa | None:
    """Return threads on the node that all GPUs of the plan belong to; None if its memory is too small for the weights.

    None also if the GPUs belong to several nodes, or if the engine has no affinity flag.
    """
    used = {share.gpu.id for share in placement.shares}
    ids = {gpu.numa_node for gpu in hardware.gpus.gpus if gpu.uuid in used}
    node = next((node for node in nodes if ids == {node.id}), None)
    if node is None or MASK_FLAG not in engine.flags or host_mib > NODE_SHARE * (node.memory_mib or 0):
        return None
    every = sum(len(each.cpus) for each in nodes)
    cores = max(1, hardware.cpu.cores * len(node.cpus) // every)
    why = f"threads stay on the GPU's node, 1 of {len(nodes)}: reads from other nodes cross the link between sockets"
    words = f"{why}; {cores} cores of it; {NOT_TOLD}"
    return Numa(mode=NODE, cpus=node.cpus, threads_max=cores, choice=_said(f"node {node.id}", words))


def _spread(nodes: tuple[NumaNode, ...]) -> Numa:
    why = f"threads are dealt out to {len(nodes)} nodes, so that the memory of each is read by its own cores"
    return Numa(mode="distribute", choice=_said("distribute", f"{why}; {NOT_TOLD}"))


def _said(value: str, why: str, source: str = "default") -> Choice:
    return Choice(name="numa", value=value, reason=why, source=source)


def cpu_mask(cpus: tuple[int, ...]) -> str:
    """Return the affinity mask in hexadecimal: "13" for CPUs 0, 1 and 4."""
    return f"{sum(1 << cpu for cpu in set(cpus)):x}"
