"""Abilities of vLLM by compute capability, and the capability that each quantization needs. The data is chips.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from appliance.engines.tables import load_table
from appliance.values import dataclass

_DATA = Path(__file__).with_name("chips.yaml")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Abilities of vLLM on one chip. `sm` is None for the CPU. `backends` are in vLLM's order. `kv_types` maps each KV
    cache type to the first backend that supports it."""

    sm: int | None
    dtype: str  # computation type for models whose own type the chip does not compute
    backends: tuple[str, ...]
    passed_over: Mapping[str, str]
    kv_types: Mapping[str, str]
    gdn: str  # default kernels of linear attention
    block_size: int
    source: str
    fp8_isa: tuple[str, ...] = ()  # CPU only: an fp8 cache needs one of these instruction sets

    @property
    def has_bfloat16(self) -> bool:
        return self.sm is None or self.sm >= 80

    @property
    def name(self) -> str:
        return "the CPU" if self.sm is None else f"SM {self.sm}"


@dataclass(frozen=True, kw_only=True)
class WeightsKernel:
    """Kernels for one quantization method. `kernel` is the one that multiplies with such weights on the given chip."""

    method: str
    least_sm: int
    kernel: str
    source: str
    dtypes: tuple[str, ...] = ()  # allowed types of activations; empty: float16 and bfloat16


@dataclass(frozen=True, kw_only=True)
class SchemeChips:
    """Compute capabilities that support a scheme of a quantization method: from `least_sm` to below `below_sm`."""

    least_sm: int
    below_sm: int | None  # None: no upper limit
    source: str
    unless: str | None = None  # flag of the engine that selects other kernels, which lifts the limits

    def runs_on(self, sm: int) -> bool:
        return self.least_sm <= sm and (self.below_sm is None or sm < self.below_sm)

    def describe(self) -> str:
        """Return words such as "SM 75 or newer", "SM 75 to below 100" or "SM 90 alone"."""
        if self.below_sm is None:
            return f"SM {self.least_sm} or newer"
        is_one = self.below_sm == self.least_sm + 1
        return f"SM {self.least_sm} alone" if is_one else f"SM {self.least_sm} to below {self.below_sm}"


def chip_of(sm: str | None, *, isa: Sequence[str] = (), is_mla: bool = False) -> Chip:
    """Return the abilities on a chip; if `sm` is None, on a CPU with the instruction sets `isa`. `is_mla` is True for a
    model with a latent cache. Raises ValueError if vLLM has no kernels for so old a chip."""
    data = _load()
    if sm is None:
        return _on_cpu(_chip(None, data["cpu"], is_mla=is_mla), isa)
    number = int(sm)
    known = [int(each) for each in data["sm"] if int(each) <= number]
    if not known:
        message = f"vLLM has no attention kernel for SM {sm}"
        raise ValueError(message)
    return _chip(number, data["sm"][str(max(known))], is_mla=is_mla)


def weights_kernel(method: str, sm: int) -> WeightsKernel | None:
    """Return the kernels of a quantization method; None if the method is not in chips.yaml."""
    row = _load()["quantization"].get(method)
    if row is None:
        return None
    kernels: Mapping[int, str] = row["kernels"]
    fitting = [least for least in kernels if least <= sm]
    kernel = kernels[max(fitting)] if fitting else ""
    dtypes = tuple(row.get("dtypes", ()))
    return WeightsKernel(method=method, least_sm=row["from"], kernel=kernel, source=row["source"], dtypes=dtypes)


def scheme_chips(scheme: str) -> SchemeChips | None:
    """Return the compute capabilities for a scheme; None if the scheme is not in chips.yaml."""
    row = _load()["schemes"].get(scheme)
    if row is None:
        return None
    return SchemeChips(least_sm=row["from"], below_sm=row.get("below"), source=row["source"], unless=row.get("unless"))


def methods_for(sm: int) -> tuple[str, ...]:
    """Return the quantization methods that a chip has kernels for."""
    return tuple(name for name, row in _load()["quantization"].items() if row["from"] <= sm)


def _chip(sm: int | None, row: Mapping[str, Any], *, is_mla: bool) -> Chip:
    attention = row["mla"] if is_mla else row
    return Chip(
        sm=sm,
        dtype=row["dtype"],
        backends=tuple(attention["backends"]),
        passed_over=attention.get("passed_over", {}),
        kv_types=attention["kv_types"],
        gdn=row["gdn"],
        block_size=attention["block_size"],
        source=row["source"],
        fp8_isa=tuple(attention.get("fp8_isa", ())),
    )


def _on_cpu(chip: Chip, isa: Sequence[str]) -> Chip:
    """Return the CPU without fp8 caches if it lacks the instruction sets for them."""
    if not set(chip.fp8_isa).isdisjoint(isa):
        return chip
    left = {name: backend for name, backend in chip.kv_types.items() if not name.startswith("fp8")}
    return replace(chip, kv_types=left)


@cache
def _load() -> Mapping[str, Any]:
    found: Mapping[str, Any] = load_table(_DATA)
    return found
