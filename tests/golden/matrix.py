"""Plans of 14 models on 14 machines, one line each in matrix.md, with what an expert would object to (letters.py).

python -m tests.golden.matrix    writes matrix.md anew, and of matrix/known.yaml the cells with a letter: what is new
                                 there needs a reason before a test takes it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from appliance.engines.llama.planning.arguments.launch import launch_of
from appliance.engines.llama.planning.inputs import PlanInputs, plan_inputs
from appliance.engines.llama.planning.memory.memory import padded
from appliance.engines.llama.planning.placement.batch import PINNED, long_costs
from appliance.engines.llama.planning.space import Space
from appliance.errors import FatalError
from appliance.model import Model
from appliance.plan import Costs, Plan
from appliance.probe import Hardware
from appliance.probe.machine.described import read_machine
from appliance.settings import CONTEXT_STEP, resolve_settings
from tests.builders import facts_for, model
from tests.golden.letters import LONG_PROMPT, Judged, is_on_gpus, objections

HERE = Path(__file__).parent / "matrix"
TABLE, KNOWN = Path(__file__).parent / "matrix.md", HERE / "known.yaml"
MACHINES = (
    "L8", "3060", "4090", "5090", "3090d", "2x2080Ti", "24+8", "4x3060", "2x4090", "MIG20", "H100", "T4", "GB10",
    "CPU64",
)  # fmt: skip
MODELS = (
    ("qwen3-30b-a3b", "Q4_K_M"),
    ("qwen3-30b-a3b-2507", "Q4_K_M"),
    ("llama-3.1-8b", "Q5_K_M"),
    ("qwen3-32b", "Q4_K_M"),
    ("deepseek-v3", "Q2_K"),
    ("gpt-oss-20b", "MXFP4"),
    ("gpt-oss-120b", "MXFP4"),
    ("gemma-3-27b", "Q4_K_M"),
    ("qwen3-next-80b-a3b", "Q4_K_M"),
    ("llama-3.3-70b", "Q4_K_M"),
    ("mistral-small-24b", "Q4_K_M"),
    ("phi-4", "Q4_K_M"),
    ("nemotron-h-8b", "Q4_K_M"),
    ("qwen2.5-vl-7b", "Q4_K_M"),
)
_ABOUT = """Written by `python -m tests.golden.matrix`; the machines are `matrix/machines/*.yaml`, the letters
`letters.py`: **D** beaten by another type of the cache, **K** past the knee, **A** attention on the CPU, **P** slow
prompts, **T** no tensor mode tried, **O** out of memory; why each is left: `matrix/known.yaml`. Speeds are predictions:
decode near empty / with half of the context, prefill of 8,192 tokens."""
KNEE_TYPES = ("f16", "q8_0")
SMALL = 4096
LARGE_BATCHES = ("2048", "4096")  # of what is on GPUs alone no figure is known beyond the first


@cache
def machine(name: str) -> Hardware:
    return read_machine(str(HERE / "machines" / f"{name}.yaml")).hardware


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`flags` are settings that somebody gives, as for a plan that a test wants to be objected to."""

    machine: str
    model: str
    quantization: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.machine} {self.model} {self.quantization}"

    @cached_property
    def of(self) -> Model:
        return model(self.model, self.quantization)

    def space(self, **flags: str) -> Space:
        image, engine = facts_for(machine(self.machine))
        settings = resolve_settings({**self.flags, **flags}, {})
        return Space(settings, image, engine, machine(self.machine), self.of)

    def judged(self) -> Judged:
        """Return the cell's best plan with its rivals. Raises the errors of the planner."""
        space = self.space()
        plan = space.best
        rivals = (*self.knees(), *self._larger_batches(plan))
        return Judged(
            plan=plan,
            model=self.of,
            space=space,
            rivals=rivals,
            splits=lambda: _splits(space),
            long_costs=self._long_costs,
        )

    def _long_costs(self, plan: Plan) -> Costs:
        launch = launch_of(plan)
        inputs = self._inputs
        job = replace(inputs.job, context=padded(plan.context), kv_type=plan.kv_type, ubatch=launch.ubatch)
        is_pinned = launch.load_mode in PINNED
        return long_costs(job, inputs.resources, plan.placement, LONG_PROMPT, is_pinned=is_pinned)

    @cached_property
    def _inputs(self) -> PlanInputs:
        image, engine = facts_for(machine(self.machine))
        return plan_inputs(resolve_settings(self.flags, {}), image, engine, machine(self.machine), self.of)

    def knees(self) -> Iterator[Plan]:
        """Yield the plan with the largest context that has every layer on GPUs, for each type of the KV cache."""
        for kv_type in KNEE_TYPES if machine(self.machine).gpus.gpus else ():
            small = self._best(kv_type=kv_type, ctx_size=str(min(SMALL, self.of.native_context)))
            if small is None or not is_on_gpus(small):
                continue
            low, high = small.context // CONTEXT_STEP, -(-self.of.native_context // CONTEXT_STEP)
            best = small
            while low < high:
                middle = (low + high + 1) // 2
                context = min(middle * CONTEXT_STEP, self.of.native_context)
                placed = self._best(kv_type=kv_type, ctx_size=str(context))
                if placed is not None and is_on_gpus(placed):
                    low, best = middle, placed
                else:
                    high = middle - 1
            yield best

    def _larger_batches(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans of the same context with larger batches. The load mode matters only if weights are in host
        memory."""
        if not plan.placement.shares:
            return
        same = {"ctx_size": str(plan.context), "kv_type": plan.kv_type}
        for ubatch in LARGE_BATCHES[:1] if is_on_gpus(plan) else LARGE_BATCHES:
            for load_mode in ("auto",) if is_on_gpus(plan) else ("auto", "none"):
                if found := self._best(**same, ubatch=ubatch, load_mode=load_mode):
                    yield found

    def _best(self, **flags: str) -> Plan | None:
        try:
            return self.space(**flags).best
        except FatalError:
            return None


def _splits(space: Space) -> frozenset[str]:
    return frozenset(plan.placement.split_mode for plan in space.all())


CELLS = tuple(
    Cell(machine=name, model=of, quantization=quantization) for of, quantization in MODELS for name in MACHINES
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One cell as people read it. `letters` are by letter, in words."""

    cell: Cell
    columns: tuple[str, ...]
    letters: Mapping[str, str]
    is_refused: bool = False

    @property
    def mark(self) -> str:
        return "ref" if self.is_refused else "".join(self.letters) or "ok"

    def __str__(self) -> str:
        objections = "; ".join(f"**{letter}** {words}" for letter, words in self.letters.items())
        return f"| {self.cell.machine} | {' | '.join(self.columns)} | {objections} |"


def line(cell: Cell) -> Line:
    try:
        judged = cell.judged()
    except FatalError as error:
        columns = ("refused", f"exit {error.exit_code}", "", "", "", "")
        return Line(cell=cell, columns=columns, letters={}, is_refused=True)
    plan, launch = judged.plan, launch_of(judged.plan)
    half = plan.context // 2
    columns = (
        f"{plan.context:,}",
        plan.kv_type,
        plan.placement.summary(),
        f"{launch.ubatch} {launch.load_mode}",
        f"{judged.decode(plan):.1f} / {judged.decode(plan, half):.1f}",
        f"{judged.prefill(plan):,.0f}",
    )
    return Line(cell=cell, columns=columns, letters=objections(judged))


def text(lines: tuple[Line, ...]) -> str:
    marks = {(each.cell.machine, each.cell.model): each.mark for each in lines}
    grid = [f"| {name} | {' | '.join(marks[at, name] for at in MACHINES)} |" for name, _ in MODELS]
    objected = sum(bool(each.letters) for each in lines)
    refused = sum(each.is_refused for each in lines)
    parts = [
        "# Plans of 14 models on 14 machines",
        _ABOUT,
        f"{len(lines)} cells: {refused} refused, {objected} with a letter.",
        "\n".join((f"| model | {' | '.join(MACHINES)} |", f"|{'---|' * (len(MACHINES) + 1)}", *grid)),
        *(_section(name, quantization, lines) for name, quantization in MODELS),
    ]
    return "\n\n".join(parts) + "\n"


def _section(name: str, quantization: str, lines: tuple[Line, ...]) -> str:
    own = [str(each) for each in lines if each.cell.model == name]
    head = "| machine | context | cache | where | ubatch, load | decode tok/s | prefill tok/s | |"
    return "\n".join((f"## {name} {quantization}", "", head, f"|{'---|' * 8}", *own))


def known() -> dict[str, dict[str, str]]:
    """Return the reasons of known.yaml, keyed by cell and then by letter."""
    found: dict[str, Any] = yaml.safe_load(KNOWN.read_text()) or {}
    return {name: dict(row) for name, row in found.items()}


def known_text(lines: tuple[Line, ...], before: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of known.yaml for these lines; reasons in `before` are kept."""
    head = (
        "# Cells of ../matrix.md with a letter, and why each is left. Written by `python -m tests.golden.matrix`; the\n"
    )
    head += "# reasons are by hand: a test takes no cell without one.\n"
    rows = []
    for each in lines:
        if each.letters:
            own = before.get(each.cell.name, {})
            why = "".join(f"  {letter}: {own.get(letter, '')}".rstrip() + "\n" for letter in each.letters)
            rows.append(f"{each.cell.name}:\n{why}")
    return head + "".join(rows)


def main() -> None:
    lines = tuple(line(cell) for cell in CELLS)
    before = known() if KNOWN.exists() else {}
    TABLE.write_text(text(lines))
    KNOWN.write_text(known_text(lines, before))


if __name__ == "__main__":
    main()
