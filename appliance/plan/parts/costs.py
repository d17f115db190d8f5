"""Predicted costs of a plan, by the part of the machine that spends the time.

Each part is off by a factor of its own, which measuring finds (tune/refit.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times in milliseconds; `..._us` are microseconds for each token that is already in the KV cache."""

    gpu_ms: float = 0.0  # decode of one token
    cpu_ms: float = 0.0
    fixed_ms: float = 0.0
    gpu_depth_us: float = 0.0
    cpu_depth_us: float = 0.0
    gpu_prefill_ms: float = 0.0  # prefill of one token
    cpu_prefill_ms: float = 0.0
    copy_ms: float = 0.0  # copy of host weights to a GPU, for each batch of a prompt
    prefill_depth_us: float = 0.0
    batch: int = 512  # tokens of a prompt in one batch
    overlap: float = 0.0  # share of a prompt's work that devices do at the same time, once a pipeline is full

    def decode_ms(self, depth: float) -> float:
        """Return the time of one token with `depth` tokens in the KV cache."""
        deep_us = self.gpu_depth_us + self.cpu_depth_us
        return self.gpu_ms + self.cpu_ms + self.fixed_ms + deep_us * depth / 1000

    def prefill_ms(self, tokens: int, depth: float) -> float:
        """Return the time of a prompt. `depth` is the number of tokens in the KV cache at the middle of the prompt.

        The last batch copies all host weights, even if it is not full.
        """
        each = self.gpu_prefill_ms + self.cpu_prefill_ms + self.prefill_depth_us * depth / 1000
        return tokens * each * self.serial(tokens) + self.copy_ms * -(-tokens // self.batch)

    def serial(self, tokens: int) -> float:
        """Return the share of a prompt's work that does not overlap. Nothing overlaps in the first batch."""
        batches = max(1, -(-tokens // self.batch))
        return 1.0 - self.overlap * (batches - 1) / batches

    def __add__(self, other: Costs) -> Costs:
        return replace(total((self, other), batch=self.batch), overlap=self.overlap)


def total(parts: Iterable[Costs], *, batch: int) -> Costs:
    """Return the sum of all parts, in one pass: a plan has a hundred parts, and a start adds up hundreds of plans."""
    rows = [_summed(part) for part in parts]
    return Costs(batch=batch, **dict(zip(_SUMMED, map(sum, zip(*rows, strict=True)), strict=False)))


_SUMMED = tuple(name for name in Costs.__dataclass_fields__ if name not in ("batch", "overlap"))
_summed = attrgetter(*_SUMMED)
