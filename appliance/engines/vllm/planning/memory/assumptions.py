"""Figures that vLLM's planner assumes if nothing was measured, each with its source and used in one place.

"chosen" at the end of a source means that the value was not measured.
"""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Assumption:
    value: float
    source: str


# Memory of a GPU, MiB
CONTEXT_MIB_EACH = Assumption(
    value=3.3, source="each multiprocessor: CUDA context, 107 on an RTX 4060 Ti's 34 to 555 on an RTX PRO 6000's 188"
)
CONTEXT_MIB = Assumption(value=512.0, source="CUDA context where the multiprocessors are unknown")
TORCH_MIB = Assumption(
    value=192.0, source="cuBLAS workspace of 32 MiB and kernels that PyTorch loads beside the context: chosen"
)
NCCL_MIB = Assumption(
    value=384.0, source="NCCL's channels and the buffers of custom all-reduce of each rank of several: chosen"
)
GRAPH_MIB_LAYER = Assumption(
    value=0.25, source="of one captured size, each layer, PIECEWISE: 5 to 15 MiB a size on models of 32 to 64 layers"
)
GRAPH_FULL_SHARE = Assumption(value=1.0, source="of that, what graphs of whole steps add in FULL_AND_PIECEWISE: chosen")
GRAPH_FIRST_MIB = Assumption(value=64.0, source="private pool of the first captured size of each mode: chosen")
ACTIVATION_SHARE = Assumption(
    value=1.25, source="above the tensors that live at once: fragments of the allocator at max_num_batched_tokens"
)
VISION_MIB = Assumption(
    value=1024.0, source="profile of a vision tower at its largest image; 0 with --mmproj off (--language-model-only)"
)
# Reserve of a GPU, MiB
REDUNDANCY_MIB = Assumption(
    value=150.0, source="vLLM's own between what it measured and what it proposes (gpu_worker.py, redundancy_buffer)"
)
DRIVER_MIB = Assumption(value=106.0, source="kernels that the driver loads at their first use: chosen")
WORKSPACE_SHARE = Assumption(
    value=0.01, source="of a card: workspaces that kernels allocate at their first use, and fragments: chosen"
)
UNSURE_SHARE = Assumption(
    value=0.03, source="of weights, activations and graphs: vLLM measures them itself, and may find more: chosen"
)
DISPLAY_MIB = Assumption(value=256.0, source="a desktop that opens another window: chosen")
JIT_MIB = Assumption(value=256.0, source="Triton kernels that are compiled and tuned at the first request: chosen")
DRAFT_MIB = Assumption(value=128.0, source="buffers of multi-token prediction: chosen")
LEFT_FREE_SHARE = Assumption(
    value=0.059,
    source="of a card below SM 80: the fullest published run that stayed up left 1,331 of an RTX 2080 Ti's 22,528 MiB, "
    "Qwen3.6-27B-AWQ on two cards with MTP and 262,144 tokens; vLLM's own default leaves 0.08",
)
# Host memory, MiB
PROCESS_MIB = Assumption(value=900.0, source="a process that imported PyTorch and vLLM: API, EngineCore, each worker")
APPLIANCE_MIB = Assumption(value=64.0, source="this program, with room for measuring")
HOST_SPARE_SHARE = Assumption(value=0.05, source="of usable host memory, left alone")
PINNED_MIB = Assumption(value=512.0, source="staging buffers in pinned memory of each rank: chosen")
# Speed
ALLREDUCE_US_NVLINK = Assumption(value=12.0, source="one small all-reduce over NVLink (custom all-reduce): chosen")
ALLREDUCE_US_PCIE = Assumption(value=30.0, source="one small all-reduce over PCIe (NCCL): chosen")
HOST_HOP_US = Assumption(value=200.0, source="the same from host to host, over Ethernet: chosen")
HOP_US = Assumption(value=60.0, source="from one pipeline stage to the next: chosen")
LAYER_US_GRAPH = Assumption(value=12.0, source="a layer's kernels that are replayed from a CUDA graph: chosen")
LAYER_US_EAGER = Assumption(value=60.0, source="a layer's kernels that the CPU launches one by one: chosen")
LAYER_US_CPU = Assumption(value=150.0, source="a layer's operations on the CPU build: chosen")
STEP_MS = Assumption(value=0.8, source="scheduler, sampler and detokenizer of one step: chosen")
STEP_MS_CPU = Assumption(value=3.0, source="the same on the CPU build: chosen")
BANDWIDTH_SHARE = Assumption(value=0.8, source="of a card's bandwidth, what its kernels stream")
DRAM_SHARE = Assumption(value=0.7, source="of a measured DRAM stream, what the CPU build's kernels reach: chosen")
DRAM_GB_S = Assumption(value=40.0, source="between desktops with DDR4 (32 to 38) and DDR5 (52 to 62)")
GPU_GB_S = Assumption(value=200.0, source="below every GPU in the bandwidth table, for one that names none")
TFLOPS_A_GB_S = Assumption(value=0.09, source="of 16-bit products for each GB/s of a card: 2080 Ti to H200 lie above")
CPU_GFLOPS_CORE = Assumption(value=40.0, source="of one core with AVX2 or better in a prompt: chosen")
# Speculative decoding: the time of a step that drafts, in steps that do not, beside the draft layer's own (law of
# plan/parts/drafts.py). Two RTX 2080 Ti, Qwen3.6-27B, a fork of 0.21; more tokens made at once need other kernels.
DRAFT_STEP = Assumption(
    value=0.4, source="4 tokens a step at most: 43.6 to 97.8 tok/s with GPTQ (4,096 + 128 tokens), 31.5 to 68 with AWQ"
)
DRAFT_STEP_CHEAP = Assumption(value=0.0, source="90 tok/s of the same AWQ with a 4-bit cache: 1.4 less 3 draft passes")
DRAFT_STEP_DEAR = Assumption(
    value=1.2, source="between two fits to 1 to 7 draft tokens and their accepted ones: 0.8 Qwen3.6-27B, 1.6 Gemma4-31B"
)
# As ln(predicted / measured), what four in five predictions are thought to stay below: no table of results judges them
SPREAD_DECODE = Assumption(
    value=0.45,
    source="chosen from three results: Qwen3-8B BF16 on an RTX 4090 58.7 tok/s (AlexsJones/llmfit#1046), 46 predicted; "
    "Qwen3.8-27B AWQ on two RTX 3090 63.1 (the same repository), about 60 predicted; two cores 36, 57 predicted",
)
SPREAD_PREFILL = Assumption(value=0.7, source="no result is known: chosen")
LINK_GB_S = Assumption(value=6.3, source="half of a third-generation x16 link, where the link is unknown")
