"""Small made-up routing: skewed, with reuse, deterministic by its seed."""

from __future__ import annotations

import random
from array import array

from appliance.moe.cost import Cost, Rates
from appliance.moe.trace import COLUMNS, Trace, Turn

DESKTOP = Rates(
    cpu_gb_s=52, pcie_gb_s=24, dram_gb_s=62, other_ms=0.08, cpu_fixed_ms=0.03, gpu_expert_ms=0.008, gpu_fixed_ms=0.0
)
COST = Cost(DESKTOP, 2.9)


def tokens(seed: int, *, count: int, experts: int, top_k: int, reuse: float = 0.4) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    weights = [1 / (1 + at) ** 0.6 for at in range(experts)]
    draw.shuffle(weights)
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        used: list[int] = []
        while len(used) < top_k:
            again = found and draw.random() < reuse
            expert = draw.choice(found[-1]) if again else draw.choices(range(experts), weights)[0]
            if expert not in used:
                used.append(expert)
        found.append(tuple(used))
    return found


def trace(seed: int, *, layers: int = 3, count: int = 80, prompt: int = 10, experts: int = 16, top_k: int = 3) -> Trace:
    turn = Turn()
    for layer in range(layers):
        used = tokens(seed + 1000 * layer, count=count + prompt, experts=experts, top_k=top_k)
        turn.prompt[layer] = array("H", [e for token in used[:prompt] for e in token])
        turn.decode[layer] = array("H", [e for token in used[prompt:] for e in token])
    k = dict.fromkeys(range(layers), top_k)
    return Trace(name="made up", architecture="test", layers=layers, experts=experts, top_k=k, turns=(turn,))


def lines(*, tokens: int = 3, layers: int = 2, experts: int = 8, top_k: int = 2, prompt: int = 2) -> list[str]:
    """A whole file: line 1 to 3 are its head, a row for each expert follows."""
    found = ["# route_trace v1\n", f"# model=/x/m.gguf arch=test n_layer={layers} n_expert={experts}\n", COLUMNS + "\n"]
    for layer in range(layers):
        found += [row(0, step, layer, slot, slot) for step in range(prompt) for slot in range(top_k)]
    for step in range(prompt, prompt + tokens):
        found += [
            row(1, step, layer, slot, (slot + step) % experts) for layer in range(layers) for slot in range(top_k)
        ]
    return found


def row(phase: int, step: int, layer: int, slot: int, expert: int, *, turn: int = 0) -> str:
    return f"{turn},{phase},{step},{layer},{slot},{expert},0.5,0,100\n"
