"""One GPU as plans see it."""

from __future__ import annotations

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or a slice of one, with its memory and rates."""

    id: str  # as CUDA_VISIBLE_DEVICES takes it
    name: str
    index: int
    free_mib: float  # free memory without `held_back_mib`; with unified memory, that of the host
    held_back_mib: float  # memory that plans leave free
    context_mib: float = 0.0  # the part of `held_back_mib` that a process takes before its first buffer
    bandwidth_gb_s: float  # bandwidth that kernels reach, below that of the memory itself
    upload_gb_s: float  # copies from pageable host memory
    pinned_gb_s: float  # copies from pinned host memory
    weights_g_s: float | None = None  # quantized weights unpacked in decode, 10^9 a second; None: unknown
    layer_us: float = 20.0  # fixed time of a layer for each token of decode
    tflops: float | None = None  # matrix products in prefill with quantized weights; None: unknown
    tflops_16: float | None = None  # the same with 16-bit weights
    tflops_attention: float | None = None  # attention in prefill; None: as `tflops_16`
    peers: tuple[int, ...] = ()  # indices of GPUs connected by NVLink
    is_slice: bool = False  # True for a MIG slice
    is_unified: bool = False  # True if GPU and host share one memory
    note: str = ""  # what slows this GPU down or uses it, for people
