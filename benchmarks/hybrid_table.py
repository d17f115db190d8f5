"""Replays traces for `appliance plan --explain`, and writes `replays.json` of appliance/engines/llama/planning/experts.

For each trace, number of slots and kind of machine: how many layer-tokens had so many hits and copies. Times of another
machine follow from these without a replay: what a policy did there it could do here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from appliance.engines.llama.planning.experts.replays import PATH
from appliance.moe.cost import Cost, Rates
from appliance.moe.trace import Trace
from benchmarks.hybrid_simulate import replay

SLOTS_SHARES = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
CPU_TO_PCIE = (0.8, 1.6, 3.0, 8.0)
HEAD = {
    "about": "Replayed routing for `appliance plan --explain`: by number of slots a layer, for several kinds of "
    "machines, [hits, copies, layer-tokens] of a token in one layer. Written by `benchmarks/hybrid.py --write-table`.",
    "source": "Helldez/BigMoeOnEdge, docs/bench-data/2026-07-15-route-trace, Apache-2.0: one prompt each, 128 decoded "
    "tokens, 6 of 8 experts used. Short and optimistic.",
}


def machines() -> Iterator[Cost]:
    """Kinds of machines: the CPU against the link, and DRAM that either has room for both or not."""
    for ratio in CPU_TO_PCIE:
        for share in (0.75, 1.0):
            cpu = 24 * ratio
            dram = max(cpu, 24.0) if share < 1 else cpu + 24
            rates = Rates(
                cpu_gb_s=cpu, pcie_gb_s=24, dram_gb_s=dram, other_ms=0.09, cpu_fixed_ms=0.03, gpu_expert_ms=0.01
            )
            yield Cost(rates, 3.0)


def write(traces: Mapping[str, Trace]) -> int:
    rows = []
    for trace in traces.values():
        by_slots = {}
        for share in SLOTS_SHARES:
            slots = max(max(trace.top_k.values()), round(share * trace.experts))
            found = {_steps(trace, cost, slots) for cost in machines()}
            by_slots[slots] = tuple(sorted(found))
        rows.append(
            {
                "architecture": trace.architecture,
                "name": trace.name,
                "layers": len(trace.top_k),
                "experts": trace.experts,
                "top_k": max(trace.top_k.values()),
                "tokens": trace.decoded,
                "by_slots": by_slots,
            }
        )
    PATH.write_text(json.dumps({**HEAD, "replays": rows}, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(rows)} traces")
    return 0


def _steps(trace: Trace, cost: Cost, slots: int) -> tuple[tuple[int, int, int], ...]:
    steps: Counter[tuple[int, int]] = Counter()
    for (_, hits, fetched, uploads), count in replay(trace, cost, slots).steps.items():
        steps[hits, fetched + uploads] += count
    return tuple(sorted((hits, copied, count) for (hits, copied), count in steps.items()))
