"""Made-up routing, to judge rules on traces that no constant was chosen on. Deterministic by kind and seed.

Every layer draws experts from Zipf weights; a share of the draws repeats one of the last token's experts.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from appliance.moe.trace import Trace, Turn

# topics: weights change every some tokens; drift: two experts change places now and then; bursts: repeats come and go;
# turn: shaped as a short turn of a model with few experts a token, 2 of 128, 85 tokens of prompt, 64 decoded
KINDS = ("zipf", "drift", "bursts", "topics", "turn")
TOPICS = 4
BURST = 20  # tokens


@dataclass(frozen=True)
class Generated:
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.seed}"

    def trace(self) -> Trace:
        draw = random.Random(self.name)
        experts = draw.choice((16, 32, 64, 128, 256))
        top_k = min(draw.choice((2, 4, 6, 8)), experts // 4)
        layers, prompt, count = draw.choice((6, 10, 16)), draw.choice((10, 30, 85)), draw.choice((64, 128, 300, 800))
        if self.kind == "turn":
            experts, top_k, layers, prompt, count = 128, 2, 12, 85, 64
        skew, repeats = draw.uniform(0.2, 1.1), draw.uniform(0, 0.5)
        turn = Turn()
        for layer in range(layers):
            used = self._layer(draw, experts, top_k, prompt + count, skew, repeats)
            turn.prompt[layer], turn.decode[layer] = used[: prompt * top_k], used[prompt * top_k :]
        k = dict.fromkeys(range(layers), top_k)
        return Trace(name=self.name, architecture="", layers=layers, experts=experts, top_k=k, turns=(turn,))

    def _layer(
        self, draw: random.Random, experts: int, top_k: int, count: int, skew: float, repeats: float
    ) -> array[int]:
        topics = [_zipf(draw, experts, skew) for _ in range(TOPICS)]
        weights, period = topics[0], draw.choice((40, 100, 250))
        before: list[int] = []
        found = array("H")
        for token in range(count):
            if self.kind == "topics" and token % period == 0:
                weights = draw.choice(topics)
            if self.kind == "drift" and draw.random() < 0.5:
                a, b = draw.randrange(experts), draw.randrange(experts)
                weights[a], weights[b] = weights[b], weights[a]
            share = repeats
            if self.kind == "bursts":
                share = 0.8 if token // BURST % 2 else 0.1
            used: list[int] = []
            while len(used) < top_k:
                again = before and draw.random() < share
                expert = draw.choice(before) if again else draw.choices(range(experts), weights)[0]
                if expert not in used:
                    used.append(expert)
            # a burst returns to the experts of three tokens, else repeats could only be the last token's
            before = (before + used)[-3 * top_k :] if self.kind == "bursts" else used
            found.extend(used)
        return found


def _zipf(draw: random.Random, experts: int, skew: float) -> list[float]:
    weights = [1 / (1 + rank) ** skew for rank in range(experts)]
    draw.shuffle(weights)
    return weights
