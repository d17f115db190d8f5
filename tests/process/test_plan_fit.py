"""Plans for the CPU against the engine's own loader: llama-fit-params opens a file that is a hole, and says what it
would take.

It differs from the server in two things, which are counted here as it does: it computes with the logits of a whole
batch, and weights that the CPU's kernels copy are in a buffer that it does not print.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from appliance.engines.engine import Install
from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.space import Space
from appliance.engines.llama.process.facts import query_facts
from appliance.engines.llama.process.fit import query_projections
from appliance.errors import ModelDoesNotFitError
from appliance.model import Model, read_model
from appliance.plan import Plan
from appliance.settings import resolve_settings
from tests.builders import IMAGE
from tests.golden.matrix import MODELS, machine
from tests.process.stages.engine import find_engine
from tests.shapes import PUBLISHED, write_gguf

MIB = 2**20
MEDIAN, WORST = 0.01, 0.03
SETTINGS: tuple[dict[str, str], ...] = ({}, {"kv_type": "q8_0"}, {"ctx_size": "8192"}, {"ubatch": "1024"})
# One slot: it knows no cache that slots share, and gives windows and states of each their own.
SAME = {"parallel": "1", "cpu_variant": "haswell"}


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Install:
    engine_dir = find_engine("llama-fit-params").parent
    facts = query_facts(engine_dir / "llama-server")
    return Install(engine_dir=engine_dir, facts=facts, cache_dir=tmp_path_factory.mktemp("cache"))


def predicted_mib(plan: Plan, model: Model) -> float:
    memory, rows = plan.memory, min(launch_of(plan).ubatch, plan.context)
    logits = 4 * rows * (model.vocabulary + 2 * model.embedding_length) / MIB
    return memory.weights - memory.repacked + memory.kv + memory.state + max(memory.compute, logits)


def errors(path: Path, install: Install) -> list[float]:
    model = read_model(path)
    found = []
    for flags in SETTINGS:
        space = Space(resolve_settings({**SAME, **flags}, {}), IMAGE, install.facts, machine("CPU64"), model)
        try:
            plan = space.best
        except ModelDoesNotFitError:
            continue
        (projection,) = query_projections([plan], install, budget_s=60.0)
        assert projection is not None, f"llama-fit-params refuses {path.name} with {flags}"
        real = sum(projection.host)
        found.append((predicted_mib(plan, model) - real) / real)
    return found


def test_plans_for_the_cpu_are_what_the_loader_would_take(install: Install, tmp_path: Path) -> None:
    found: dict[str, list[float]] = {}
    for name, quantization in MODELS:
        path = write_gguf(tmp_path / f"{name}.gguf", PUBLISHED[name], quantization=quantization)
        found[name] = errors(path, install)
        path.unlink()
    every = [abs(error) for row in found.values() for error in row]
    words = "\n".join(f"{name}: {', '.join(f'{error:+.2%}' for error in row)}" for name, row in found.items())
    print(f"{len(every)} plans: median {statistics.median(every):.2%}, worst {max(every):.2%}\n{words}")
    assert len(every) >= 40
    assert statistics.median(every) <= MEDIAN, words
    assert max(every) <= WORST, words
