"""What this image was built for and what its engine can do: written while the image is built, read at every start.

Up to three files lie beside each other in an image. `image_facts.json` is rendered from the matrix; `engine_facts.json`
is what the engine's own binary said when it was asked (`appliance engine-facts`), so nothing parses `--help` at start;
`recipe.json`, in a model image alone, says which weights it may serve and where they can be had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from appliance.documents import read
from appliance.values import dataclass

SCHEMA = 1
IMAGE_FACTS_PATH = "/opt/appliance/image_facts.json"
ENGINE_FACTS_PATH = "/opt/appliance/engine_facts.json"
RECIPE_PATH = "/opt/appliance/recipe.json"
BAKED_MODELS_PATH = "/opt/models"  # a hub cache that is only read: weights that are in the image itself
# Chips of Jetson and of DRIVE: machine code neither comes from another chip nor goes to one, whatever the numbers say.
# CUDA C++ Programming Guide, 6.1.2; images/facts/nvidia.yaml has the same, and a test holds the two together.
TEGRA = frozenset({"87", "101", "110"})
# For which chips of a CUDA release there is an image of one chip: of build_matrix.yaml, and a test holds them together.
CUDA_CHIPS: Mapping[str, str] = {
    "13.4": "75 80 86 89 90 100 103 110 120 121",
    "13.0": "75 80 86 89 90 100 103 110 120 121",
    "12.9": "103 121",
    "12.8": "75 80 86 89 90 100 120",
    "12.4": "75 80 86 89 90",
}


Tier = Literal["quality", "balanced", "compact"]
WeightsFormat = Literal["gguf", "safetensors"]


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """One file of a rung."""

    path: str  # inside the source's repository, and below its snapshot on the volume
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One quantization of one model of a recipe: what is fetched and served together.

    `files` are in order: parts of a split file first to last, the multimodal projector behind them. Without `repo` and
    `url` there is no address: the weights are in the image or were put on the volume.
    """

    name: str  # `8b-q4_k_m`: what stands behind the colon of `--model qwen:8b-q4_k_m`
    tier: Tier  # of its quantization, among rungs of the same model
    format: WeightsFormat
    repo: str | None  # Hugging Face: organisation/repository
    revision: str | None  # the full commit id
    url: str | None  # of the only file, in place of a repository
    files: tuple[RecipeFile, ...]
    parameters_b: float  # 10⁹
    active_b: float  # 10⁹, for one token
    loss: str | None  # of the quantization, in the publisher's words
    loss_source: str | None
    # `architecture`, `vocabulary`, `is_tied`, `quantization`; `metadata`: GGUF keys without the architecture's prefix.
    # Enough to reckon memory and speed before a byte is fetched. Of the text model alone.
    shape: Mapping[str, Any] | None
    source: str  # where sizes and hashes were read

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def place(self, file: RecipeFile) -> str:
        """Where a file lies below a hub cache; without a repository, below a folder of models."""
        if self.repo is None:
            return file.path
        return f"models--{self.repo.replace('/', '--')}/snapshots/{self.revision}/{file.path}"

    @property
    def published(self) -> tuple[str, ...]:
        """The names that people know it by: of its repository, and of its file or folder."""
        repository = (self.repo or "").rpartition("/")[2]
        path = PurePosixPath(self.weights[0].path)
        file = path.name if self.format == "gguf" else path.parent.name
        return tuple(name for name in dict.fromkeys((repository, file)) if name)

    @property
    def weights(self) -> tuple[RecipeFile, ...]:
        """Without the projector."""
        return tuple(file for file in self.files if not is_projector(file.path))

    @property
    def projector(self) -> RecipeFile | None:
        return next((file for file in self.files if is_projector(file.path)), None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The models that a model image may serve: one name, a ladder of rungs from small to large."""

    name: str
    license: str
    rungs: tuple[Rung, ...]
    default: str  # a rung's name: what is served where nothing else decides
    chat: Mapping[str, Any]  # chat_template_kwargs
    reasoning: str | None  # name of the reasoning parser, where an engine wants one
    tools: str | None  # likewise of the tool call parser
    speculation: str | None  # what the models themselves bring for it: `mtp`
    projector: str | None  # what a projector among a rung's files adds: `image`

    @property
    def default_rung(self) -> Rung:
        return next(rung for rung in self.rungs if rung.name == self.default)

    def find(self, name: str) -> tuple[Rung, ...]:
        """The rung of that name, else all whose names begin with it."""
        exact = tuple(rung for rung in self.rungs if rung.name == name)
        return exact or tuple(rung for rung in self.rungs if rung.name.startswith(name))


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What it was built for. `build_id` hashes Dockerfile, locks, sources and base; it keys caches and profiles."""

    build_id: str
    cell: str
    engine: str
    engine_version: str
    engine_build: int
    engine_commit: str
    cuda: str | None = None
    sm: tuple[str, ...] = ()
    driver_floor_sass: str | None = None
    driver_floor_ptx: str | None = None
    cpu_variants: tuple[str, ...] = ()
    recipe: str | None = None  # the name of the recipe in recipe.json; None: not a model image


@dataclass(frozen=True, kw_only=True)
class CpuVariant:
    """One build of the engine's CPU kernels. `isa` is what it was compiled for, in /proc/cpuinfo's words."""

    name: str
    isa: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FlagChoices:
    """The values that a flag takes, where it lists them."""

    flag: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A method of quantized weights. `lowest_sm` of its GPU kernels; None: it does not say so without a GPU."""

    name: str
    lowest_sm: str | None


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One way to compute attention that an engine chooses from. None: it does not say so without a GPU."""

    name: str
    sms: tuple[str, ...] | None  # it runs on these chips; empty: on a CPU
    kv_types: tuple[str, ...] | None  # empty: any
    dtypes: tuple[str, ...] | None  # of activations
    is_mla: bool | None  # for models with a latent KV cache, and for no others


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the engine binary says of itself."""

    version: str
    build: int
    commit: str  # empty: a build that does not name it
    flags: tuple[str, ...]  # every spelling that --help lists, sorted
    kv_types: tuple[str, ...]
    kv_pairs: tuple[tuple[str, str], ...] = ()  # pairs with fast flash attention; empty: any pair of equal types
    backends: tuple[str, ...] = ()  # file names of the loadable backends, sorted
    split_modes: tuple[str, ...] = ()  # how it can split a model across GPUs
    cpu_variants: tuple[CpuVariant, ...] = ()  # those that are there, the fastest last; empty: it has one, or none
    choices: tuple[FlagChoices, ...] = ()  # of the flags that list their values
    quantizations: tuple[Quantization, ...] = ()  # of weights
    attention: tuple[AttentionBackend, ...] = ()
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()  # name and version of what it is installed with and loads by itself

    def choices_of(self, flag: str) -> tuple[str, ...]:
        """Empty for a flag that takes any value, and for one that is not there."""
        return next((each.values for each in self.choices if each.flag == flag), ())


def runs_on(form: str, sm: str) -> bool:
    """Whether machine code of a form (`80`, `90a`, `120f`) runs on the chip `sm`.

    Plain and `f`: same major, equal or higher minor, never from or to a Tegra. `a`: that chip alone.
    """
    own = form.rstrip("af")
    if form.endswith("a") or own in TEGRA or sm in TEGRA:
        return own == sm
    return own[:-1] == sm[:-1] and int(own) <= int(sm)


def folders_by_hand(models_dir: Path, repo: str | None) -> tuple[Path, ...]:
    """Where people put files of a repository: among the models, or there in a folder `publisher/repository`."""
    return (models_dir, models_dir / repo) if repo else (models_dir,)


def is_projector(path: str) -> bool:
    """Whether a file is a multimodal projector, by its name: mmproj-F16.gguf, gemma-4-E4B-it-mmproj.gguf."""
    return "mmproj" in path.rpartition("/")[2].lower()


def dump_facts(facts: ImageFacts | EngineFacts) -> str:
    """JSON with sorted keys and a final newline: the same facts are the same bytes."""
    return _dumped(facts)


def dump_recipe(recipe: Recipe) -> str:
    """Likewise."""
    return _dumped(recipe)


def _dumped(facts: ImageFacts | EngineFacts | Recipe) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(facts)}, indent=1, sort_keys=True) + "\n"


def parse_image_facts(text: str) -> ImageFacts:
    """Raises ValueError when `text` is not what `dump_facts` writes."""
    return read(ImageFacts, _checked(text, "image facts"))


def parse_engine_facts(text: str) -> EngineFacts:
    """Raises ValueError when `text` is not what `dump_facts` writes."""
    return read(EngineFacts, _checked(text, "engine facts"))


def parse_recipe(text: str) -> Recipe:
    """Raises ValueError when `text` is not what `dump_recipe` writes, and for a default that is none of its rungs."""
    return read(Recipe, _checked(text, "recipe"), rules={Recipe: _has_default, Rung: _has_files})


def _has_default(recipe: Recipe) -> bool:
    return recipe.default in {rung.name for rung in recipe.rungs}


def _has_files(rung: Rung) -> bool:
    return bool(rung.weights)


def _checked(text: str, what: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{what} are not JSON: {error}"
        raise ValueError(message) from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        message = f"{what} have another schema than {SCHEMA}"
        raise ValueError(message)
    return data
