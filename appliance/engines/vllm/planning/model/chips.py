"""chips.yaml: what vLLM does on each compute capability, and which it needs for each way to store weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from appliance.values import dataclass

_DATA = Path(__file__).with_name("chips.yaml")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """`sm` is None for the CPU. `backends` in vLLM's order; `kv_types` with the first backend that takes each."""

    sm: int | None
    dtype: str  # that is best where a model is in 16 bits
    backends: tuple[str, ...]
    passed_over: Mapping[str, str]
    kv_types: Mapping[str, str]
    gdn: str  # kernels of linear attention that vLLM takes by itself
    block_size: int
    source: str
    fp8_isa: tuple[str, ...] = ()  # instruction sets of a CPU, one of which an fp8 cache needs

    @property
    def has_bfloat16(self) -> bool:
        return self.sm is None or self.sm >= 80

    @property
    def name(self) -> str:
        return "the CPU" if self.sm is None else f"SM {self.sm}"


@dataclass(frozen=True, kw_only=True)
class WeightsKernel:
    """Of one method. `kernel` is what multiplies with such weights on the chip that was asked for."""

    method: str
    least_sm: int
    kernel: str
    source: str
    dtypes: tuple[str, ...] = ()  # that activations may have; empty: both of 16 bits


@dataclass(frozen=True, kw_only=True)
class SchemeChips:
    """Compute capabilities that a scheme of a method runs on, from `least_sm` and below `below_sm`."""

    least_sm: int
    below_sm: int | None  # None: on all newer ones
    source: str
    unless: str | None = None  # a flag of the engine that takes other kernels

    def runs_on(self, sm: int) -> bool:
        return self.least_sm <= sm and (self.below_sm is None or sm < self.below_sm)

    def describe(self) -> str:
        """As in "SM 75 or newer", "SM 75 to below 100", "SM 90 alone"."""
        if self.below_sm is None:
            return f"SM {self.least_sm} or newer"
        is_one = self.below_sm == self.least_sm + 1
        return f"SM {self.least_sm} alone" if is_one else f"SM {self.least_sm} to below {self.below_sm}"


def chip_of(sm: str | None, *, isa: Sequence[str] = (), is_mla: bool = False) -> Chip:
    """Of the CPU with these instruction sets for None; `is_mla` for a model with a latent cache. Raises ValueError for
    a chip below all that vLLM has kernels for."""
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
    """None for a method that nobody has looked up."""
    row = _load()["quantization"].get(method)
    if row is None:
        return None
    kernels: Mapping[int, str] = row["kernels"]
    fitting = [least for least in kernels if least <= sm]
    kernel = kernels[max(fitting)] if fitting else ""
    dtypes = tuple(row.get("dtypes", ()))
    return WeightsKernel(method=method, least_sm=row["from"], kernel=kernel, source=row["source"], dtypes=dtypes)


def scheme_chips(scheme: str) -> SchemeChips | None:
    """None for a scheme that nobody has looked up."""
    row = _load()["schemes"].get(scheme)
    if row is None:
        return None
    return SchemeChips(least_sm=row["from"], below_sm=row.get("below"), source=row["source"], unless=row.get("unless"))


def methods_for(sm: int) -> tuple[str, ...]:
    """Ways to store weights that a chip has kernels for."""
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
    """Without the types that its instruction sets do not reach."""
    if not set(chip.fp8_isa).isdisjoint(isa):
        return chip
    left = {name: backend for name, backend in chip.kv_types.items() if not name.startswith("fp8")}
    return replace(chip, kv_types=left)


@cache
def _load() -> Mapping[str, Any]:
    import yaml  # here: a start of another engine must not pay for it

    found: Mapping[str, Any] = yaml.load(_DATA.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return found
