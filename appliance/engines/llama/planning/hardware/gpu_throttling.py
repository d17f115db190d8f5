"""Causes that slow a GPU down: link, ECC, power cap; and which of them predictions count. Pure."""

from __future__ import annotations

from appliance.engines.llama.planning.hardware.rates import WATTS_POWER, counts_power
from appliance.probe import Gpu

FULL_WIDTH = 8  # lanes; a slot with fewer is named
# PCIe generation by the lowest compute capability that has it: data sheets of A100 and H100
GENERATIONS = {0: 3, 80: 4, 90: 5}
WIDE_BUS = 2048  # bits; memory with so wide a bus is HBM, whose ECC costs no bandwidth


def handicaps(gpu: Gpu) -> list[str]:
    found = [_link(gpu), _generation(gpu), _ecc(gpu), _power(gpu)]
    return [words for words in found if words]


def power_share(gpu: Gpu) -> float:
    """Return the share of its matrix product rate that a card keeps under its power cap, 0 to 1.

    1 if the number of multiprocessors is known, because the rates then count the power (`counts_power`).
    """
    limit, default = gpu.power_limit_w, gpu.power_limit_default_w
    if counts_power(gpu) or limit is None or default is None or gpu.mig_profile is not None:
        return 1.0
    share: float = min(1.0, limit / default) ** WATTS_POWER
    return share


def _link(gpu: Gpu) -> str:
    width, most = gpu.pcie_width, gpu.pcie_width_max
    if width is None or gpu.is_unified:
        return ""
    if most is not None and width < most:
        return f"its link has {width} of {most} lanes"
    return f"its slot has {width} lane{'s' * (width > 1)}" if width < FULL_WIDTH else ""


def _generation(gpu: Gpu) -> str:
    """Return words if the slot has an older PCIe generation than the card; "" otherwise.

    The highest generation of card and slot decides, because an idle card runs its link at a lower one.
    """
    has = gpu.pcie_generation_max or gpu.pcie_generation
    if has is None or gpu.sm is None or not gpu.sm.isdecimal() or gpu.is_unified:
        return ""
    most = GENERATIONS[max(sm for sm in GENERATIONS if sm <= int(gpu.sm))]
    return f"its slot has PCIe {has}, and the card could use {most}" if has < most else ""


def _ecc(gpu: Gpu) -> str:
    is_felt = gpu.ecc and gpu.bus_bits is not None and gpu.bus_bits < WIDE_BUS
    return "ECC is on: it takes part of the bandwidth, which is not in the prediction" if is_felt else ""


def _power(gpu: Gpu) -> str:
    limit, default = gpu.power_limit_w, gpu.power_limit_default_w
    if limit is None or default is None or limit >= default:
        return ""
    is_counted = counts_power(gpu) or power_share(gpu) < 1
    counts = "prefill is predicted with it, decode without" if is_counted else "which is not in the prediction"
    return f"its power is capped at {limit:,.0f} of {default:,.0f} W: {counts}"
