"""How much memory a plan takes: formulas only. What the engine then allocates is read from its log and kept beside it.

Units: MiB are floats of 2**20 bytes. Sources: KV bytes and block sizes from llama.cpp's ggml-common.h (blocks of 32
values with their scales); compute buffer from sizes seen in llama-server's log (test_plan.py holds them).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from appliance.model import Model

MIB = 2**20
KV_BYTES = MappingProxyType(
    {
        "f32": 4.0,
        "f16": 2.0,
        "bf16": 2.0,
        "q8_0": 34 / 32,
        "q5_1": 24 / 32,
        "q5_0": 22 / 32,
        "q4_1": 20 / 32,
        "q4_0": 18 / 32,
        "iq4_nl": 18 / 32,
    }
)
"""Bytes per value of the KV cache."""

CONTEXT_STEP = 256  # llama.cpp pads the cache to this many cells
ENGINE_MIB = (
    160.0  # code, vocabulary, threads, HTTP: llama-server's resident memory beyond its buffers, seen with 49 K tokens
)
APPLIANCE_MIB = 96.0  # this program, serving


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Host memory in MiB. `total` is what must fit; `cache` grows to its size with use and never beyond."""

    weights: float
    kv: float
    compute: float
    output: float
    cache: float
    overhead: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.compute + self.output + self.cache + self.overhead


def weights_mib(model: Model) -> float:
    """What the CPU backend repacks for its own kernels moves out of the mapping, so nothing is counted twice."""
    return model.weights_bytes / MIB


def kv_bytes_per_token(model: Model, kv_type: str) -> float:
    """Both caches over all attention layers; an upper bound where `model.cache_reason` says so."""
    return sum(model.kv_heads) * (model.key_length + model.value_length) * KV_BYTES[kv_type]


def kv_mib(model: Model, kv_type: str, context: int) -> float:
    return kv_bytes_per_token(model, kv_type) * padded(context) / MIB


def compute_mib(model: Model, ubatch: int, context: int) -> float:
    """The scheduler's buffer with flash attention: activations of one ubatch in f32, and the mask in f16.

    An upper bound: seen were 0.6 to 1.0 of it, since the scheduler lets buffers share memory that this adds up.
    """
    heads_width = model.heads * model.key_length
    activations = 4 * ubatch * (4 * model.embedding_length + 2 * model.feed_forward_length + 2 * heads_width)
    return (1.01 * activations + 2 * ubatch * padded(context)) / MIB


def output_mib(model: Model, parallel: int) -> float:
    """Logits in f32 for one token of each slot: llama-server's n_outputs_max is its number of slots."""
    return 4 * model.vocabulary * parallel / MIB


def padded(context: int) -> int:
    return -(-context // CONTEXT_STEP) * CONTEXT_STEP
