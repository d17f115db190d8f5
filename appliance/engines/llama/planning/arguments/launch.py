"""Launch settings that only llama-server has, and the effect of each knob on speed."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.engines.llama.planning.arguments.passthrough_options import Extras
from appliance.engines.llama.planning.memory.rope import Rope
from appliance.moe.cost import Rates
from appliance.plan import PREDICTED, KnobEffect, Launch, Plan, launch_as
from appliance.plan.parts.launch import Value
from appliance.values import dataclass

NUMA_MODES = ("distribute", "isolate", "numactl")  # values of the engine's flag
NODE = "node"  # threads bound to the GPU's NUMA node by an affinity mask


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """Slots on the GPUs for experts that lie in host memory."""

    count: int  # in each layer
    mib: tuple[float, ...]  # on each GPU of the plan, which its memory includes
    rates: Rates  # of this machine for this model: the engine decides by them
    speedup: float  # modelled decode speed to that without slots in the same placement; 1 if it is not modelled


@dataclass(frozen=True, kw_only=True)
class LlamaLaunch(Launch):
    """Launch settings of llama-server. Sizes are in tokens unless the name says otherwise."""

    threads: int
    threads_batch: int
    batch: int
    ubatch: int
    cache_ram_mib: int
    flash_attention: bool
    load_mode: str
    checkpoints: int | None = None  # context checkpoints for each slot; None: the model needs none
    extras: Extras = Extras()
    rope: Rope | None = None  # RoPE scaling; None: the context is within the native length
    numa: str | None = None  # NODE, one of NUMA_MODES, or "off"; None: the machine has one node
    cpus: tuple[int, ...] = ()  # CPUs that threads are bound to; empty: all
    idle_slots_stay: bool = False  # True if idle slots keep their tokens: the prompt cache is too small for them
    slots: ExpertSlots | None = None  # None: experts in host memory are computed on the CPU
    overrides: tuple[str, ...] = ()  # of the file's metadata, as --override-kv takes them

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        found: tuple[tuple[str, Value], ...] = (
            ("threads", self.threads),
            ("ubatch", self.ubatch),
            ("load_mode", self.load_mode),
        )
        found = found if self.numa is None else (*found, ("numa", self.numa))
        return found if self.slots is None else (*found, ("moe_slots", self.slots.count))

    @property
    def reads(self) -> tuple[str, ...]:
        return self.extras.reads

    @property
    def tie_break(self) -> int:
        """Return 1 for mmap, else 0: the kernel may share mapped weights between processes and drop them."""
        return int(self.load_mode == "mmap")

    @property
    def may_queue(self) -> bool:
        """False if idle slots keep their tokens: a waiting user's conversation would then evict another's."""
        return not self.idle_slots_stay


# Priors come from the spread of such steps in tuning.md, section 3. Threads change the CPU's costs, a ubatch the time
# of prefill.
KNOB_EFFECTS: Mapping[str, KnobEffect] = {
    "threads": KnobEffect(prior=0.3, parts=("cpu",), is_of_doubling=True),
    "ubatch": KnobEffect(prior=0.15, phases=("prefill",)),
    "kv_type": KnobEffect(),
    "load_mode": KnobEffect(),
    "moe_slots": KnobEffect(prior=0.7, phases=("decode",), absent=0),  # modelled from one prompt, never seen on a GPU
    "numa": KnobEffect(parts=("cpu",)),
    "cpu_variant": KnobEffect(prior=0.3, parts=("cpu",)),  # more instructions may not mean more speed
    "split": KnobEffect(prior=0.3),  # the time of exchanges depends on links and drivers, which are not measured
    "placement": PREDICTED,
}


def launch_of(plan: Plan) -> LlamaLaunch:
    """Return the launch settings of a plan. Raises TypeError for a plan of another engine."""
    return launch_as(plan, LlamaLaunch)
