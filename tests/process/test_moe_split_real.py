"""Experts on CPU and GPU in the real engine, without a GPU: ggml's Vulkan backend on lavapipe computes the slots.

Needs a build of the patched source with -DGGML_VULKAN=ON, which no image has: APPLIANCE_TEST_VULKAN_DIR is the folder
of its programs, APPLIANCE_TEST_VULKAN_RUN a command that runs them elsewhere, such as `docker exec NAME` with /tmp
mounted (and DOCKER_HOST before it, which tests unset).
Results are compared with a run on the CPU alone. `--no-op-offload` everywhere: with it off, large batches of experts
run on the GPU in all placements, and nothing is compared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from pathlib import Path

import pytest

from appliance.moe.cache import layer_caches
from appliance.moe.cost import Cost, Rates
from appliance.moe.trace import parse_trace
from tests.shapes import SMALL, Shape, write_gguf

EXPERTS, TOP_K, WIDTH, LAYERS = 16, 4, 256, 4
MORE = {"expert_count": EXPERTS, "expert_used_count": TOP_K}
# its heads are together as wide as the model
NARROW = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 32)
NARROW["expert_shared_feed_forward_length"] = 256
SHAPES: dict[str, Shape] = {
    "qwen3moe": SMALL["moe"].changed(**MORE),
    "qwen2moe": replace(SMALL["moe"].changed(**NARROW, **MORE), architecture="qwen2moe"),
    "deepseek2": SMALL["mla"].changed(**MORE),
    "qwen35moe": SMALL["delta-net-moe"].changed(block_count=8, nextn_predict_layers=None, **MORE),
    "gpt-oss": SMALL["sliding-sinks"].changed(**MORE),
}
DELTA = dict(SHAPES["qwen35moe"].metadata)
del DELTA["rope.dimension_sections"]
SHAPES["qwen3next"] = replace(SHAPES["qwen35moe"], architecture="qwen3next", metadata=DELTA)
RATES = Rates(
    cpu_gb_s=52, pcie_gb_s=24, dram_gb_s=62, other_ms=0.08, cpu_fixed_ms=0.003, gpu_expert_ms=0.001, gpu_fixed_ms=0.0
)
TEXT = Path(__file__).parents[2] / "README.md"
PLACED = ("-ngl", "99", "-ncmoe", "99", "--no-op-offload")


def programs() -> str:
    folder = os.environ.get("APPLIANCE_TEST_VULKAN_DIR")
    if not folder:
        pytest.skip("needs an engine with Vulkan: set APPLIANCE_TEST_VULKAN_DIR")
    return folder


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence from the run on the CPU."""

    mean: float
    most: float


class Runs:
    """Runs of one model's file over the same text."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        (folder / "text").write_bytes(TEXT.read_bytes()[1500:3000])
        (folder / "rates.json").write_text(json.dumps(asdict(RATES)))
        self.run("-dev", "none", "--kl-divergence-base", str(folder / "base"))

    @property
    def compared(self) -> tuple[str, ...]:
        return ("--kl-divergence", "--kl-divergence-base", str(self.folder / "base"))

    def run(self, *arguments: str, fault: bool = False) -> str:
        done = self.start(*arguments, fault=fault)
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout

    def start(self, *arguments: str, fault: bool = False) -> subprocess.CompletedProcess[str]:
        around = ["env", "GGML_VK_VISIBLE_DEVICES=0", *(["LLAMA_MOE_FAULT=1"] if fault else [])]
        asked = ("-f", str(self.folder / "text"), "-c", "64", "--chunks", "4", "-fa", "off", "-t", "2")
        command = [
            *shlex.split(os.environ.get("APPLIANCE_TEST_VULKAN_RUN", "")),
            *around,
            f"{programs()}/llama-perplexity",
        ]
        return subprocess.run(
            [*command, "-m", str(self.model), *asked, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )

    def divergence(self, *arguments: str, fault: bool = False) -> Divergence:
        said = self.run(*self.compared, *PLACED, *arguments, fault=fault)
        found = dict(re.findall(r"(Mean {4}KLD|Maximum KLD): +([0-9.e-]+)", said))
        return Divergence(mean=float(found["Mean    KLD"]), most=float(found["Maximum KLD"]))

    def slots(self, count: int, *more: str) -> tuple[str, ...]:
        return ("--moe-slots", str(count), "--moe-rates", str(self.folder / "rates.json"), *more)


def figure(said: str, pattern: str) -> float:
    found = re.search(pattern, said)
    assert found, said[-2000:]
    return float(found[1])


Make = Callable[[str, str], Runs]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    programs()
    made: dict[tuple[str, str], Runs] = {}

    def one(shape: str, quantization: str) -> Runs:
        if (shape, quantization) not in made:
            folder = tmp_path_factory.mktemp(f"{shape}-{quantization}")
            model = write_gguf(
                folder / "m.gguf", SHAPES[shape], quantization=quantization, with_data=True, is_varied=True
            )
            made[shape, quantization] = Runs(folder, model)
        return made[shape, quantization]

    return one


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [*product(SHAPES, ("F16", "Q8_0")), ("qwen3moe", "Q4_K_M"), ("qwen3moe", "MXFP4"), ("gpt-oss", "MXFP4")],
)
def test_slots_change_no_result(make: Make, shape: str, quantization: str) -> None:
    """With as many slots as a token uses, twice as many, and all; the floor is the last digit that is printed."""
    runs = make(shape, quantization)
    limit = max(2 * runs.divergence("-ub", "16").mean, 2e-6)
    for slots in (TOP_K, 2 * TOP_K, EXPERTS):
        assert runs.divergence("-ub", "16", *runs.slots(slots)).mean <= limit


def test_a_hit_from_a_wrong_slot_is_found(make: Make) -> None:
    runs = make("qwen3moe", "F16")
    limit = 2 * runs.divergence("-ub", "16").mean
    assert runs.divergence("-ub", "16", *runs.slots(8), fault=True).mean > limit


@pytest.mark.parametrize("policy", ["cpu", "lru"])
@pytest.mark.parametrize("tokens", ["1", "7", "300"])
def test_other_policies_change_no_result(make: Make, policy: str, tokens: str) -> None:
    runs = make("qwen3moe", "F16")
    plain = runs.divergence("-ub", tokens)
    found = runs.divergence("-ub", tokens, *runs.slots(8, "--moe-policy", policy))
    assert found.mean <= 2 * plain.mean
    if policy == "cpu":
        assert found.most == pytest.approx(plain.most, abs=2e-6)


def test_hits_are_those_of_the_reference(make: Make) -> None:
    """Token by token and with copies in order, the engine's slots are the simulator's on the routes it recorded."""
    runs = make("qwen3moe", "F16")
    trace = runs.folder / "trace.csv"
    runs.divergence("-b", "64", "-ub", "1", *runs.slots(8, "--no-moe-overlap", "--moe-trace", str(trace)))
    check_hits(trace.read_text().splitlines(keepends=True), slots=8)


def check_hits(lines: Sequence[str], *, slots: int) -> None:
    trace = parse_trace(lines)
    assert trace.decoded > 100
    assert trace.expert_mb == 3 * WIDTH * WIDTH * 2 / 1e6
    cost = Cost(RATES, trace.expert_mb)
    caches = layer_caches([cost] * LAYERS, slots=slots, experts=EXPERTS, top_k=[TOP_K] * LAYERS)
    rows = [[int(cell) for cell in (*line.split(",")[:6], line.split(",")[7])] for line in lines[3 + LAYERS :]]
    for (_, layer), group in groupby(rows, key=lambda row: (row[2], row[3])):
        token = list(group)
        used = [row[5] for row in token]
        decision = caches[layer].decide(used, is_prompt=token[0][1] == 0)
        for upload in decision.uploads:
            caches[layer].landed(upload)
        caches[layer].observe()
        places = [1 if e in decision.gpu else 2 if e in decision.fetch else 0 for e in used]
        assert [row[6] for row in token] == places, f"step {token[0][2]}, layer {layer}"
    assert sum(row[6] == 1 for row in rows) > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*PLACED, "--moe-slots", "3"), "a token uses 4 experts of layer 0, give at least 4"),
        ((*PLACED, "--moe-slots", "0"), "the number of slots must be 1 or more: 0"),
        (("-ngl", "99", "--moe-slots", "8"), "4 have them on a GPU (--n-cpu-moe keeps them in host memory)"),
        (("-ngl", "0", "--moe-slots", "8"), "4 are not computed on a GPU (--gpu-layers)"),
        ((*PLACED, "--moe-slots", "8", "--moe-policy", "best"), "the policy is none of split, cpu, lru: best"),
    ],
)
def test_what_cannot_have_slots_is_refused(make: Make, arguments: tuple[str, ...], words: str) -> None:
    runs = make("qwen3moe", "F16")
    done = runs.start("-lv", "5", "--moe-rates", str(runs.folder / "rates.json"), *arguments)
    assert done.returncode != 0
    assert words in done.stdout


def test_a_model_without_experts_is_refused(make: Make, tmp_path: Path) -> None:
    runs = copy(make("qwen3moe", "F16"))
    runs.model = write_gguf(tmp_path / "m.gguf", SMALL["gqa"], quantization="F16", with_data=True)
    done = runs.start(*PLACED, "-lv", "5", *runs.slots(8))
    assert done.returncode != 0
    assert "this model has no experts, leave them out" in done.stdout


def test_prompts_in_large_batches_fill_the_slots(make: Make) -> None:
    """Batches of 40 tokens do not use the slots; the rest of a batch, below 32, finds experts in them. The median,
    since a large batch with Vulkan is now and then far off for a whole sequence, with and without slots."""
    runs = make("gpt-oss", "F16")
    said = runs.run(*runs.compared, *PLACED, "-ub", "40", "-lv", "5", *runs.slots(8))
    assert figure(said, r"(\d+) hits") > figure(said, r"(\d+) layer-tokens") * TOP_K / 4
    assert figure(said, r"Median {2}KLD: +([0-9.e-]+)") <= 1e-5


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"pcie_gb_s": 0}, "a rate must be positive and finite: pcie_gb_s"),
        ({"other_ms": -1}, "a time must be finite and not below zero: other_ms"),
        ({"dram_gb_s": "fast"}, "is no JSON object with a number dram_gb_s"),
        ({"cpu_gb_s": float("nan")}, "is no JSON object with a number cpu_gb_s"),
    ],
)
def test_unusable_rates_are_refused(make: Make, written: dict[str, object], words: str) -> None:
    runs = make("qwen3moe", "F16")
    rates = runs.folder / "bad.json"
    rates.write_text(json.dumps({**asdict(RATES), **written}))
    done = runs.start(*PLACED, "-lv", "5", "--moe-slots", "8", "--moe-rates", str(rates))
    assert done.returncode != 0
    assert words in done.stdout


def test_uses_are_kept_and_a_damaged_file_is_ignored(make: Make) -> None:
    runs = make("qwen3moe", "F16")
    kept = runs.folder / "uses"
    asked = ("-ub", "1", "-lv", "5", *PLACED, *runs.slots(8, "--moe-uses", str(kept)))
    runs.run(*asked)
    whole = kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "slots filled from the uses in" in runs.run(*asked)
    kept.write_text(whole[:-40])
    assert "is damaged, the slots start empty" in runs.run(*asked)
    assert kept.read_text() == whole
