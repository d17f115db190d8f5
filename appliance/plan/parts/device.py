"""One GPU as plans see it."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """`id` is what CUDA_VISIBLE_DEVICES takes."""

    id: str
    name: str
    index: int
    free_mib: float  # what is free now, less what is held back; of unified memory all that the host has
    held_back_mib: float
    context_mib: float = 0.0  # of what is held back, what a process takes before its first buffer
    bandwidth_gb_s: float  # what kernels reach, not what the memory could
    upload_gb_s: float  # host to device, from pageable memory
    pinned_gb_s: float
    weights_g_s: float | None = None  # quantized weights that it unpacks for a token, 10^9 a second; None: unknown
    layer_us: float = 20.0  # of each layer of a token, beside what it reads
    tflops: float | None = None  # of matrix products in a prompt, quantized weights; None: unknown
    tflops_16: float | None = None  # of 16-bit weights
    tflops_attention: float | None = None  # of attention in a prompt; None: as of 16-bit weights
    peers: tuple[int, ...] = ()  # indices of GPUs over NVLink
    is_slice: bool = False
    is_unified: bool = False
    note: str = ""  # what a person should know of these figures
