"""The policy of experts is written twice, for the engine in C++ (images/patches/llama-moe-split.patch) and as reference
in appliance/moe: both decide the same on random routes, to the last bit of the predicted time."""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import astuple
from functools import partial
from pathlib import Path

import pytest

from appliance.moe.cache import GUARD_TOKENS, Decision, Rule, Upload, layer_caches
from appliance.moe.cost import Cost, Rates
from tests.process.stages.made_once import made_once
from tests.unit.moe.routing import DESKTOP, tokens

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "images/patches/llama-moe-split.patch"
MAIN = ROOT / "tests/process/stages/moe_policy.cpp"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
FAST_LINK = Rates(
    cpu_gb_s=15, pcie_gb_s=52, dram_gb_s=120, other_ms=0.08, cpu_fixed_ms=0.03, gpu_expert_ms=0.008, gpu_fixed_ms=0.01
)
SLOW_GPU = Rates(
    cpu_gb_s=52, pcie_gb_s=24, dram_gb_s=62, other_ms=0.08, cpu_fixed_ms=0.01, gpu_expert_ms=0.3, gpu_fixed_ms=0.0
)


def added_file(patch: str, name: str) -> str:
    """Return a file that the patch adds."""
    _, found, rest = patch.partition(f"\n+++ b/{name}\n")
    assert found, f"the patch adds no {name}"
    body = rest.partition("\ndiff --git ")[0]
    return "".join(f"{line[1:]}\n" for line in body.splitlines() if line.startswith("+"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's unit as the engine compiles it, with a main function that reads events."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    return made_once(tmp_path_factory, "policy", partial(build, compiler))


def build(compiler: str, folder: Path) -> Path:
    patch = PATCH.read_text(encoding="utf-8")
    for name in ("llama-moe-policy.h", "llama-moe-policy.cpp"):
        (folder / name).write_text(added_file(patch, f"src/{name}"), encoding="utf-8")
    built = folder / "policy"
    sources = [str(MAIN), str(folder / "llama-moe-policy.cpp")]
    subprocess.run([compiler, *FLAGS, f"-I{folder}", *sources, "-o", str(built)], check=True, timeout=300)
    return built


def answers(program: Path, events: list[str]) -> list[str]:
    done = subprocess.run(
        [str(program)], input="\n".join(events), capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


def in_words(decision: Decision) -> str:
    uploads = "".join(
        f"{u.expert}:{-1 if u.victim is None else u.victim}:{u.slot}:{int(u.is_fetch)}," for u in decision.uploads
    )
    places = "|".join(",".join(map(str, each)) for each in (decision.gpu, decision.fetch, decision.cpu))
    return f"{places}|{uploads}|{decision.ms:.17g}"


class Both:
    """Events for the program beside the lines that the reference expects for them."""

    def __init__(
        self, rates: Rates, *, rule: Rule, guarded: bool, slots: int, experts: int, top_k: int, layers: int = 10
    ) -> None:
        self.experts, self.top_k = experts, top_k
        mb = 2.9
        self.expected: list[str] = []
        self.caches = layer_caches(
            [Cost(rates, mb)] * layers,
            slots=slots,
            experts=experts,
            top_k=[top_k] * layers,
            on_takeover=lambda takeover: self.expected.append(takeover.in_words()),
            is_guarded=guarded,
        )
        self.caches[0].shared.rule = rule
        numbers = " ".join(float(each).hex() for each in astuple(rates))
        self.events = [f"init {rule} {int(guarded)} {slots} {experts} {layers} {top_k} {mb} {numbers}"]

    def begin(self, draw: random.Random) -> None:
        for layer, cache in enumerate(self.caches):
            counts = [draw.randrange(4) * draw.randrange(900) for _ in range(self.experts)]
            had = draw.choice((100, 300, 5000))
            self.events.append(f"b {layer} {had} {' '.join(map(str, counts))}")
            self.expected.append("".join(f"{','.join(map(str, cache.begin(had, counts)))}|"))

    def run(self, draw: random.Random, count: int) -> None:
        """Copies end at once, before or after the token is learned, or later. Prompts are up to 30 tokens."""
        routes = [
            tokens(draw.randrange(10**6), count=count, experts=self.experts, top_k=self.top_k) for _ in self.caches
        ]
        flying: list[tuple[int, Upload]] = []
        late = draw.random() < 0.5
        prompt = 0
        for token in zip(*routes, strict=True):
            prompt = draw.randrange(30) if draw.random() < 0.02 else prompt - 1
            for layer, (cache, used) in enumerate(zip(self.caches, token, strict=True)):
                decision = self.decide(layer, used, is_prompt=prompt > 0)
                flying += [(layer, upload) for upload in decision.uploads]
                if not late:
                    self._end(flying, draw, 1.0)
                self.events.append(f"o {layer}")
                cache.observe()
                if late:
                    self._end(flying, draw, 0.4)

    def decide(self, layer: int, used: tuple[int, ...], *, is_prompt: bool = False) -> Decision:
        self.events.append(f"d {layer} {int(is_prompt)} {' '.join(map(str, used))}")
        decision = self.caches[layer].decide(used, is_prompt=is_prompt)
        self.expected.append(in_words(decision))
        return decision

    def land(self, layer: int, upload: Upload) -> None:
        self.events.append(f"l {layer} {upload.expert}")
        self.caches[layer].landed(upload)

    def _end(self, flying: list[tuple[int, Upload]], draw: random.Random, share: float) -> None:
        for each in [each for each in flying if draw.random() < share]:
            flying.remove(each)
            self.land(*each)


CASES: dict[str, tuple[Rates, Rule, bool, int, int, int]] = {
    f"{made[1]}-{made[3]}-of-{made[4]}": made
    for made in (
        (DESKTOP, "priced", True, 12, 64, 6),
        (DESKTOP, "priced", False, 8, 128, 8),
        (FAST_LINK, "priced", True, 6, 24, 4),
        (FAST_LINK, "lru", False, 9, 32, 3),
        (SLOW_GPU, "priced", True, 5, 16, 3),
        (DESKTOP, "lru-1", False, 4, 16, 2),
        (DESKTOP, "cpu", True, 6, 24, 4),
        (DESKTOP, "priced", True, 0, 24, 4),
    )
}


@pytest.mark.parametrize("case", CASES)
def test_both_decide_the_same(program: Path, case: str) -> None:
    rates, rule, guarded, slots, experts, k = CASES[case]
    both = Both(rates, rule=rule, guarded=guarded, slots=slots, experts=experts, top_k=k)
    draw = random.Random(case)
    if both.caches[0].slots > 5:
        both.begin(draw)
    both.run(draw, 280)
    assert sum(event.startswith("d ") for event in both.events) == 2800
    found = [line for line in answers(program, both.events) if not line.startswith("warning: ")]
    wrong = next((i for i, pair in enumerate(zip(found, both.expected, strict=False)) if pair[0] != pair[1]), None)
    assert wrong is None, f"answer {wrong}: {found[wrong]} instead of {both.expected[wrong]}"
    assert len(found) == len(both.expected)


def test_a_rule_takes_over_in_both(program: Path) -> None:
    """Experts at random: no use predicts the next one, and another rule takes over. Prices are tried again later."""
    both = Both(DESKTOP, rule="priced", guarded=True, slots=12, experts=32, top_k=4, layers=1)
    draw = random.Random(1)
    for _ in range(11 * GUARD_TOKENS):
        for upload in both.decide(0, tuple(draw.sample(range(32), 4))).uploads:
            both.land(0, upload)
        both.events.append("o 0")
        both.caches[0].observe()
    assert any("takes over" in line for line in both.expected)
    assert any("priced is tried again" in line for line in both.expected)
    assert answers(program, both.events) == both.expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("2.9 0 ", "a rate must be positive and finite: cpu_gb_s"),
        ("2.9 nan ", "a rate must be positive and finite: cpu_gb_s"),
        ("0 9 ", "the size of an expert must be positive and finite"),
    ],
)
def test_unusable_rates_are_refused(program: Path, change: str, words: str) -> None:
    (found,) = answers(program, [f"init priced 1 4 8 2 2 {change}9 9 0 0 0 0"])
    assert found.startswith(f"error: {words}")


def test_slots_that_save_nothing_are_warned_of(program: Path) -> None:
    """A GPU that takes longer for an expert than the CPU for all of a token's."""
    (found,) = answers(program, ["init priced 1 4 8 2 2 2.9 52 24 62 0.08 0.01 0.3 0"])
    assert found.startswith("warning: experts of 2.9")
    assert found.endswith("the slots save nothing")


def test_fewer_slots_than_a_token_uses_are_refused(program: Path) -> None:
    (found,) = answers(program, ["init priced 1 3 16 2 4 2.9 9 9 9 0 0 0 0"])
    assert found == "error: 3 slots a layer hold less than one token's experts: 4"


def test_a_decision_takes_at_most_five_microseconds(program: Path) -> None:
    """A layer of Qwen3-30B's shape, in CPU time of the thread: other work on the machine does not count."""
    events = ["init priced 1 24 128 48 8 2.9 52 24 62 0.08 0.03 0.008 0", "time 48 400"]
    best = min(float(answers(program, events)[-1]) for _ in range(3))
    assert best <= 5.0
