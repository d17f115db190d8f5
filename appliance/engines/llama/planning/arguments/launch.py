"""What llama-server is started with beside what every plan has."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engines.llama.planning.arguments.passthrough_options import Extras
from appliance.engines.llama.planning.memory.rope import Rope
from appliance.plan import PREDICTED, KnobEffect, Launch, Plan, launch_as
from appliance.plan.parts.launch import Value
from appliance.values import dataclass

NUMA_MODES = ("distribute", "isolate", "numactl")  # of the engine's flag
NODE = "node"  # the GPU's, by affinity


@dataclass(frozen=True, kw_only=True)
class LlamaLaunch(Launch):
    """Sizes in tokens unless the name says otherwise."""

    threads: int
    threads_batch: int
    batch: int
    ubatch: int
    cache_ram_mib: int
    flash_attention: bool
    load_mode: str
    checkpoints: int | None = None  # context checkpoints of each slot; None: the model needs none
    extras: Extras = Extras()
    rope: Rope | None = None  # how a context above the native length is reached
    numa: str | None = None  # NODE, a mode of the engine's, or off; None: the machine has one node
    cpus: tuple[int, ...] = ()  # that threads are bound to; empty: all
    idle_slots_stay: bool = False  # in the context, since the prompt cache could not take a long conversation

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        found: tuple[tuple[str, Value], ...] = (
            ("threads", self.threads),
            ("ubatch", self.ubatch),
            ("load_mode", self.load_mode),
        )
        return found if self.numa is None else (*found, ("numa", self.numa))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.extras.reads

    @property
    def tie_break(self) -> int:
        """Mapped weights: the kernel may share them and drop them."""
        return int(self.load_mode == "mmap")

    @property
    def may_queue(self) -> bool:
        """Where the prompt cache does not take what leaves its slot, users would evict one another."""
        return not self.idle_slots_stay


# Priors of a step: from the spread of such steps in tuning.md, section 3. Threads cost what the CPU reads and computes,
# a ubatch what is prefilled.
KNOB_EFFECTS: Mapping[str, KnobEffect] = {
    "threads": KnobEffect(prior=0.3, parts=("cpu",), is_of_doubling=True),
    "ubatch": KnobEffect(prior=0.15, phases=("prefill",)),
    "kv_type": KnobEffect(),
    "load_mode": KnobEffect(),
    "numa": KnobEffect(parts=("cpu",)),
    "cpu_variant": KnobEffect(prior=0.3, parts=("cpu",)),  # of what the instructions promise
    "split": KnobEffect(prior=0.3),  # what cards exchange depends on links and drivers that nobody has measured
    "placement": PREDICTED,
}


def launch_of(plan: Plan) -> LlamaLaunch:
    """Raises TypeError for a plan of another engine."""
    return launch_as(plan, LlamaLaunch)
