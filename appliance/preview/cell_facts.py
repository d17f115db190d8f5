"""Contents of an image that is not here, from package data: for a plan in a checkout or from a wheel."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines import cells
from appliance.engines.cells import Cell
from appliance.engines.engine import Engine, load
from appliance.errors import ConfigError, FatalError, printable
from appliance.image_facts import Recipe
from appliance.model import Format, find_model
from appliance.model.recipes import find_recipe, near_models
from appliance.model.shapes.published import near_shapes, shape_called
from appliance.probe import Hardware
from appliance.settings import Settings
from appliance.start.attachments import check_files
from appliance.start.checks import check_supported, usable_gpus, version_numbers
from appliance.start.image import ImageContents, check_settings, load_engine
from appliance.values import dataclass

BUILD_ID = "not-built"  # in paths of caches, which only a container has
_AMD64, _ARM64 = "linux/amd64", "linux/arm64"
_ARM = "asimd"  # of every Arm CPU with 64 bits, and of no other


@dataclass(frozen=True, kw_only=True)
class Stand:
    """The cell that a plan is for where no image is. `facts_of` is the built cell whose engine facts are used."""

    cell: str
    facts_of: str
    is_picked: bool  # by --cell; False: chosen for the machine
    engine: str  # with its release

    def describe(self) -> str:
        """Describe the cell, for example "for the image ENGINE-cu130-sm89, chosen for the machine; …"."""
        why = "picked" if self.is_picked else "chosen for the machine"
        said = f"for the image {self.cell}, {why}; facts of its engine ({self.engine}) are"
        if self.facts_of == self.cell:
            return f"{said} those that were recorded when it was built"
        return f"{said} those of {self.facts_of}, which was built with the same release"


def has_image(settings: Settings) -> bool:
    """True in an image, and if a folder with the facts of one is named."""
    return settings.is_set("facts_dir") or (settings.facts_dir / "image_facts.json").exists()


def contents_of_cell(settings: Settings, hardware: Hardware, name: str | None) -> tuple[ImageContents, Stand]:
    """Return what the image of a cell holds, without an image; the cell of the machine if none is named.

    Raises ConfigError (10) for an unknown cell, and what says that no image can run on the machine (20, 21, 23).
    """
    cell = cells.find_cell(name) if name else _cell_for(settings, hardware)
    source = cells.facts_source(cell)
    image = replace(cell.image, build_id=BUILD_ID)
    engine = load_engine(image)
    facts = engine.facts_in_cell(
        cells.engine_facts(source), image, kv_pairs=cell.kv_pairs, is_arm=_is_arm(hardware, cell)
    )
    check_settings(settings, engine)
    check_files(settings)
    settings, recipe = _understood(settings, engine)
    release = f"{image.engine_version}, build {image.engine_build}" if image.engine_build else image.engine_version
    stand = Stand(cell=cell.name, facts_of=source.name, is_picked=name is not None, engine=f"{image.engine} {release}")
    return ImageContents(settings=settings, image=image, facts=facts, engine=engine, recipe=recipe), stand


def _understood(settings: Settings, engine: Engine) -> tuple[Settings, Recipe | None]:
    """The settings with the model's name as shapes or recipes have it, and the recipe; a file comes first."""
    request = settings.model
    if request is None:
        if settings.models_dir.is_dir():
            return settings, None
        message = "no model is named, and there is no volume whose only model it could be"
        raise ConfigError(message, hint="name one: --model qwen3-32b@Q4_K_M, qwen:8b, org/repo:Q4_K_M or a file's path")
    if find_model(request, settings.models_dir):
        return settings, None
    if engine.model_format == "gguf" and (shape := shape_called(request)):
        return replace(settings, model=shape.name), None
    recipe, name = find_recipe(request) or (None, request)
    is_served = recipe is not None and any(rung.format == engine.model_format for rung in recipe.rungs)
    return (replace(settings, model=name), recipe) if is_served else (settings, None)


def unknown_model(called: str) -> ConfigError:
    """Return the error for a name of no file, shape or recipe, with the nearest that can be planned instead."""
    near = [*near_shapes(called), *near_models(called)]
    message = f"no model of that name can be planned here: {printable(called)}"
    known = "a model is a published shape, one of a recipe, a GGUF file, org/repo[:QUANT] or an address"
    return ConfigError(message, hint=f"perhaps you meant {' or '.join(near[:3])}; {known}" if near else known)


def _cell_for(settings: Settings, hardware: Hardware) -> Cell:
    """The cell that serves most of the machine's GPU memory, then the one that is made for these chips."""
    platforms, fits, refusals = _platforms(hardware), list[Cell](), list[FatalError]()
    wanted = _format(settings)
    for cell in cells.cells().values():
        if load(cell.image.engine).model_format != wanted or not set(platforms) & set(cell.platforms):
            continue
        try:
            check_supported(settings, cell.image, hardware)
            fits.append(cell)
        except FatalError as error:
            refusals.append(error)
    if not fits:
        raise _nothing(refusals, wanted, " or ".join(platforms))
    uses_gpus = bool(hardware.gpus.gpus) and settings.devices != "none"
    return max(fits, key=lambda cell: _worth(cell, hardware) if uses_gpus else (cell.image.cuda is None,))


def _worth(cell: Cell, hardware: Hardware) -> tuple[float | tuple[int, ...], ...]:
    image = cell.image
    served = usable_gpus(image, hardware)
    memory = sum(gpu.vram_total_mib or hardware.memory.total_mib for gpu in served)
    chips = {gpu.sm for gpu in served if gpu.sm}
    own = {form.rstrip("af") for form in image.sm}
    newest = hardware.gpus.cuda_driver
    release = version_numbers(image.cuda or "")
    is_known = newest is None or release <= version_numbers(newest)
    return memory, len(chips & own), -len(own - chips), is_known, cell in cells.built(), release


def _format(settings: Settings) -> Format:
    """Return the format of the requested model: a folder is safetensors, every other name counts as GGUF."""
    found = find_model(settings.model, settings.models_dir) if settings.model else None
    return "safetensors" if found and found.is_dir() else "gguf"


def _nothing(refusals: list[FatalError], wanted: Format, platform: str) -> FatalError:
    """The refusal that says most: of a driver before that of a chip, and of a chip before that of a CPU image."""
    if not refusals:
        return ConfigError(
            f"no image for {wanted} is for {platform}", hint="`python -m images list` shows what there is"
        )
    return min(refusals, key=lambda error: (error.exit_code != 21, error.exit_code))


def _platforms(hardware: Hardware) -> tuple[str, ...]:
    """Return the platforms that the machine may be of: both if its file does not say what the CPU is."""
    if not hardware.cpu.isa:
        return _AMD64, _ARM64
    return (_ARM64 if _ARM in hardware.cpu.isa else _AMD64,)


def _is_arm(hardware: Hardware, cell: Cell) -> bool:
    """True on Arm; an unknown CPU counts as x86 if the cell has an image for it."""
    return next((each for each in _platforms(hardware) if each in cell.platforms), _AMD64) == _ARM64
