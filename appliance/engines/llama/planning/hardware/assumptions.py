"""Figures that plans assume if nothing was measured, each with its source and used in one place.

`is_measured` is False for figures that were read or computed, and never seen on the hardware in question.
"""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Assumption:
    value: float
    source: str
    is_measured: bool = False


# Memory, MiB
ENGINE_MIB = Assumption(
    value=48.0,
    source="llama-server beyond its buffers: 6 MiB anonymous, 12 of its libraries, 22 more after 12 long requests",
    is_measured=True,
)
VOCABULARY_KIB = Assumption(
    value=0.45, source="of llama-server for each token: 27, 67 and 114 MiB at 49, 152 and 262 K", is_measured=True
)
APPLIANCE_MIB = Assumption(
    value=64.0,
    source="this program: 35 MiB serving, 36 after 12 requests at once; the rest for measuring",
    is_measured=True,
)
GPU_MARGIN_MIB = Assumption(
    value=1024.0,
    source="llama.cpp's own margin a device (--fit-target): pools that grow, fragments, here the context too",
)
DISPLAY_MIB = Assumption(value=256.0, source="a desktop that opens another window: chosen, not measured")

# Speed
DRAM_SHARE = Assumption(value=0.82, source="of a measured DRAM stream, what llama.cpp's kernels reach: 0.75 to 0.9")
DRAM_GB_S = Assumption(
    value=40.0, source="between desktops with DDR4 (32 to 38) and DDR5 (52 to 62), never measured here"
)
GPU_GB_S = Assumption(value=200.0, source="below every GPU in the bandwidth table, for one that names none")
PCIE_LANE_GB_S = Assumption(
    value=0.125 * 128 / 130, source="GB/s for each GT/s of a lane, PCIe 3.0 and newer (128b/130b)"
)
PCIE_SHARE = Assumption(value=0.85, source="of the link's rate, what pinned copies reach: 0.80 to 0.90")
PAGEABLE_SHARE = Assumption(value=0.5, source="of pinned copies, what pageable ones reach: chosen, not measured")
PCIE_GB_S = Assumption(value=6.3, source="half of a third-generation x16 link, where the link is unknown")
# rates.py has the rates of each class of cards and cores. These figures hold for all classes.
MOE_LAYERS = Assumption(
    value=0.6,
    source="of a card's fixed cost of a layer, what routing and gathering of experts adds: benchmarks/speed_model.yaml",
)
RECURRENT_LAYERS = Assumption(
    value=0.6, source="of the same, what the many small kernels of a recurrent layer add: benchmarks/speed_model.yaml"
)
RECURRENT_SHARE = Assumption(
    value=0.009,
    source="of 16-bit products, what a recurrent layer's state is updated at in a prompt, one token after the other: "
    "benchmarks/speed_model.yaml",
)
PIPELINE_SHARE = Assumption(
    value=0.85,
    source="of what several cards can overlap in a prompt of many ubatches: 0.93 in llama.cpp#20793, where 4 cards "
    "read 4 and 8 of them 2.09 and 2.57 times as fast as one; less in benchmarks/speed_model.yaml",
)
CPU_LAYER_US = Assumption(
    value=70.0, source="a layer's operations, where a CPU's threads wait for one another: 40 to 91 fit as well"
)
HOP_US = Assumption(value=20.0, source="two copies of about 10 us between devices, there and back")
EXPERTS_HOP_US = Assumption(
    value=35.0,
    source="a layer's experts on the CPU, beside what they read: the GPU is awaited, activations and chosen experts' "
    "numbers are copied there, the sum back (ggml-backend.cpp, compute_splits); benchmarks/speed_model.yaml: 20 to 80",
)
ROUTER_SKEW = Assumption(
    value=0.25,
    source="shape of the gamma distribution of how often a router draws an expert: of 128, 512 tokens use 72 to "
    "95 in a layer (llama.cpp#15346); prompts with experts in host memory in benchmarks/speed_model.yaml",
)
GPU_GFLOPS_A_GB_S = Assumption(value=100.0, source="of a prompt's matrix products on a card of no known class: chosen")
HALF_BATCH = Assumption(
    value=60.0,
    source="tokens for a matrix at which a card does half of what it can: RTX 4090, Q4_0, 16 to 512 (llama.cpp#7676)",
)
MOE_PREFILL_SHARE = Assumption(value=0.65, source="of that, what experts' matrices reach: benchmarks/speed_model.yaml")
LARGE_UBATCH_SHARE = Assumption(
    value=0.5,
    source="of what a ubatch above 512 gains by arithmetic: an RTX 3090 reads gemma4 26B.A4B 1.27 times as fast with "
    "1,024 and 1.49 with 2,048 (llama.cpp#22298), where arithmetic says 1.4 and 1.9 for as many experts; an RX 7900 "
    "XTX Qwen3-30B-A3B 1.12 to 1.51 (#24546)",
)
ATTENTION_SHARE = Assumption(value=0.75, source="of 16-bit products, what flash attention reaches: the same")
PREFILL_GAIN_CPU = Assumption(
    value=2.1, source="the same on a CPU: 247 tok/s of prefill at 116 of decode, two threads", is_measured=True
)
# With a quantized cache llama.cpp's CPU kernels leave their fast paths: attention in tiles, and decode over all cores.
ROUNDED_CACHE_DECODE = Assumption(
    value=1.7, source="a q8_0 cache on a CPU against f16 at the same depth, three models: 1.4 to 2.3", is_measured=True
)
ROUNDED_CACHE_GPU = Assumption(
    value=1.0,
    source="of the time of f16 for each token in a quantized cache on a GPU. No pair at depth is known for CUDA: its "
    "kernel for it reads K and V once a query head (fattn.cu, ggml_cuda_get_best_fattn_kernel), and with ROCm q8_0 was "
    "slower (llama.cpp#21788). `tests/gpu/run.sh cache` measures it",
)
ROUNDED_CACHE_PREFILL = Assumption(value=7.0, source="the same for the tokens of a prompt: 5 to 11", is_measured=True)

PCIE_GT_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}  # by generation, as the PCI-SIG names them
