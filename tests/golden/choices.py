"""Which file of a recipe is served on described machines, one table each, to be read by people and compared by a test.

python -m tests.golden.choices    writes tests/golden/choices/*.txt anew: read the difference before keeping it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.engines.engine import Install, load
from appliance.probe import Hardware
from appliance.selection.candidates import Chosen, choose_variant
from appliance.selection.recipe import variants_called
from appliance.selection.request import FromRecipe
from appliance.selection.table import as_text
from appliance.settings import resolve_settings
from appliance.start.image import ImageContents
from appliance.start.machine import UsableMachine
from images.recipes import recipe as recipes
from images.rows import PROJECT
from tests.builders import facts_for
from tests.golden.files import write_anew
from tests.golden.machines import MACHINES, without_gpu

HERE = Path(__file__).parent / "choices"


def _one_card(
    name: str, *, vram_mib: int | None = None, gb_s: float | None = None, memory_mib: int = 64000
) -> Hardware:
    found = MACHINES[name]
    card = found.gpus.gpus[0]
    if vram_mib is not None:
        card = replace(card, vram_total_mib=vram_mib, vram_free_mib=vram_mib, bandwidth_gb_s=gb_s)
    memory = replace(found.memory, total_mib=memory_mib, available_mib=memory_mib - 2048)
    return replace(found, gpus=replace(found.gpus, gpus=(card,)), memory=memory)


KINDS: Mapping[str, Hardware] = {
    "rtx-4090": _one_card("2x4090"),
    "laptop-8g": MACHINES["laptop-5060"],
    "laptop-8g-16g-ram": _one_card("laptop-5060", memory_mib=16000),
    "2x2080ti-22g": MACHINES["2x2080ti-22g"],
    "cpu-16g": MACHINES["cpu-16g"],
    "h100": _one_card("h200", vram_mib=81559, gb_s=3352.0, memory_mib=256000),
    "two-cores": without_gpu(8192, 2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    machine: str
    recipe: str
    flags: Mapping[str, str] = field(default_factory=dict)
    wanted: str = ""

    @property
    def name(self) -> str:
        asked = "".join(f"_{name}-{value}" for name, value in self.flags.items())
        return f"{self.machine}_{self.recipe}{f'-{self.wanted}' if self.wanted else ''}{asked}"


CASES: Sequence[Case] = (
    *(Case(machine=machine, recipe="qwen") for machine in KINDS),
    *(Case(machine=machine, recipe="gemma") for machine in ("rtx-4090", "laptop-8g", "cpu-16g")),
    *(Case(machine=machine, recipe="gpt-oss") for machine in ("rtx-4090", "laptop-8g", "h100", "cpu-16g")),
    Case(machine="rtx-4090", recipe="qwen", flags={"ctx_size": "131072"}),
    Case(machine="rtx-4090", recipe="qwen", flags={"tier": "quality"}),
    Case(machine="laptop-8g", recipe="qwen", wanted="3.5-9b"),
)


def chosen(case: Case) -> Chosen:
    hardware = KINDS[case.machine]
    image, facts = facts_for(hardware)
    engine = load(image.engine)
    settings = resolve_settings({**case.flags, "data_dir": "/nonexistent"}, {})
    recipe = recipes.as_recipe(recipes.load(PROJECT, case.recipe))
    contents = ImageContents(settings=settings, image=image, facts=facts, engine=engine, recipe=recipe)
    machine = UsableMachine(
        hardware=hardware,
        install=Install(engine_dir=Path("/opt/e"), facts=facts, cache_dir=Path("/nonexistent")),
        kernels=engine.choose_kernels(settings, facts, hardware.cpu, None),
        warnings=(),
    )
    ladder = [rung for rung in recipe.rungs if rung.format == engine.model_format]
    found = FromRecipe(recipe=recipe, variants=variants_called(case.wanted, ladder, recipe.name), here=())
    return choose_variant(contents, found, {}, machine)


def text(case: Case) -> str:
    asked = "".join(f", {name} {value}" for name, value in case.flags.items())
    head = f"{case.recipe}{f':{case.wanted}' if case.wanted else ''} on {case.machine}{asked}"
    return f"{head}\n\n{as_text(chosen(case).choice)}\n"


def main() -> None:
    write_anew(HERE, {case.name: text(case) for case in CASES})


if __name__ == "__main__":
    main()
