"""GPU memory that is held back from plans: the CUDA context of a process, and room beside its buffers. Pure.

NVML tells the free memory before there is a context. llama.cpp's log and its fit tell it with the context in place.
Nothing is held back for kernels that the driver compiles (JIT): images carry machine code for each of their chips, and
`images verify` fails on a kernel without.
"""

from __future__ import annotations

from appliance.engines.llama.planning.hardware import assumptions
from appliance.engines.llama.planning.hardware.assumptions import Assumption
from appliance.probe import Gpu

# Published figures: multiprocessors of the card, MiB, driver (None: not told), source.
PUBLISHED = (
    (34, 107, None, "RTX 4060 Ti, ggml-org/llama.cpp#23604"),
    (82, 256, "610.43.03", "RTX 3090, invoke-ai/InvokeAI#9413"),
    (82, 264, None, "RTX 3090, 24,124 less 23,860 in llama-server before a buffer, ollama/ollama#17482"),
    (188, 555, None, "RTX PRO 6000 Blackwell, ggml-org/llama.cpp#23604"),
    (148, 612, None, "B200, unslothai/unsloth#8669"),
)
CONTEXT_MIB_EACH = Assumption(value=3.3, source="each multiprocessor: no published card but the B200 takes more")
DATACENTER_MIB_EACH = Assumption(value=4.2, source="the same on chips of SM 10.x: the B200")
CONTEXT_MIB = Assumption(
    value=512.0, source="where multiprocessors are unknown: 120 to 550 by card (ggml-org/llama.cpp#20595)"
)
ROOM_MIB = Assumption(
    value=512.0,
    source="pools that grow, kernels that load late, fragments: half of llama.cpp's margin, on the largest cards too",
)


def context_mib(gpu: Gpu) -> float:
    if gpu.sm_count is None:
        return CONTEXT_MIB.value
    is_datacenter = (gpu.sm or "").startswith("10") and len(gpu.sm or "") == 3
    return gpu.sm_count * (DATACENTER_MIB_EACH if is_datacenter else CONTEXT_MIB_EACH).value


def held_back_mib(gpu: Gpu) -> float:
    """Return the MiB that plans leave free on a GPU: CUDA context, ROOM_MIB, and more if a screen is attached.

    Context and room are never less than llama.cpp's own margin, because no published figure says what fills the room.
    """
    context = context_mib(gpu)
    display = assumptions.DISPLAY_MIB.value if gpu.display else 0.0
    return max(assumptions.GPU_MARGIN_MIB.value, context + ROOM_MIB.value) + display
