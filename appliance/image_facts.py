"""What this image was built for and what its engine can do: written while the image is built, read at every start.

An image has up to three files in one folder. `image_facts.json` is rendered from the matrix. `engine_facts.json` is
what the engine's own binary reported (`appliance engine-facts`), so nothing parses `--help` at start. `recipe.json`
exists in a model image only: it lists the weights that may be served and where to download them.
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
BAKED_MODELS_PATH = "/opt/models"  # read-only hub cache with the weights that are part of the image
# Chips of Jetson and of DRIVE: their machine code runs on no other chip, and they run no other chip's, whatever the
# numbers say. CUDA C++ Programming Guide, 6.1.2; images/facts/nvidia.yaml has the same list, and a test compares the
# two.
TEGRA = frozenset({"87", "101", "110"})
# CUDA release -> chips that have a single-chip image. Same as in build_matrix.yaml; a test compares the two.
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
    """One file of a variant."""

    path: str  # path in the source's repository, and below its snapshot on the volume
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One variant: one quantization of one model of a recipe, whose files are downloaded and served together.

    `files` are in order: parts of a split file first to last, then the multimodal projector. Without `repo` and `url`
    there is nothing to download: the weights are in the image or were put on the volume.
    """

    name: str  # the part after the colon of `--model qwen:8b-q4_k_m`
    tier: Tier  # tier of the quantization, among variants of the same model
    format: WeightsFormat
    repo: str | None  # Hugging Face: organisation/repository
    revision: str | None  # the full commit id
    url: str | None  # address of the only file, instead of a repository
    files: tuple[RecipeFile, ...]
    parameters_b: float  # 10⁹
    active_b: float  # 10⁹ parameters that are used for one token
    loss: str | None  # quality loss of the quantization, in the publisher's words
    loss_source: str | None
    # `architecture`, `vocabulary`, `is_tied`, `quantization`; `metadata`: GGUF keys without the architecture's prefix.
    # Describes the text model only. Memory and speed are estimated from it before anything is downloaded.
    shape: Mapping[str, Any] | None
    source: str  # where sizes and hashes come from

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def place(self, file: RecipeFile) -> str:
        """Return the file's path below a hub cache; without a repository, its path below a folder of models."""
        if self.repo is None:
            return file.path
        return f"models--{self.repo.replace('/', '--')}/snapshots/{self.revision}/{file.path}"

    @property
    def published(self) -> tuple[str, ...]:
        """Names under which the variant was published: of its repository, and of its file or folder."""
        repository = (self.repo or "").rpartition("/")[2]
        path = PurePosixPath(self.weights[0].path)
        file = path.name if self.format == "gguf" else path.parent.name
        return tuple(name for name in dict.fromkeys((repository, file)) if name)

    @property
    def weights(self) -> tuple[RecipeFile, ...]:
        """The variant's files without the multimodal projector."""
        return tuple(file for file in self.files if not is_projector(file.path))

    @property
    def projector(self) -> RecipeFile | None:
        return next((file for file in self.files if is_projector(file.path)), None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The models that a model image may serve: one name, and its variants from small to large."""

    name: str
    license: str
    rungs: tuple[Rung, ...]
    default: str  # name of the variant that is served if nothing else decides
    chat: Mapping[str, Any]  # chat_template_kwargs
    reasoning: str | None  # name of the reasoning parser, for an engine that needs one
    tools: str | None  # name of the tool call parser, for an engine that needs one
    speculation: str | None  # speculative decoding that the models have built in: `mtp`
    projector: str | None  # input that a variant's projector adds: `image`

    @property
    def default_rung(self) -> Rung:
        return next(rung for rung in self.rungs if rung.name == self.default)

    def find(self, name: str) -> tuple[Rung, ...]:
        """Return the variant of that name, else all variants whose names begin with it."""
        exact = tuple(rung for rung in self.rungs if rung.name == name)
        return exact or tuple(rung for rung in self.rungs if rung.name.startswith(name))


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What the image was built for. `build_id` is a hash of Dockerfile, locks, sources and base; caches and profiles
    are keyed by it."""

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
    recipe: str | None = None  # name of the recipe in recipe.json; None: not a model image


@dataclass(frozen=True, kw_only=True)
class CpuVariant:
    """One build of the engine's CPU kernels. `isa` lists the instruction sets that it needs, in /proc/cpuinfo's
    words."""

    name: str
    isa: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FlagChoices:
    """The values that a flag accepts, for a flag that lists them."""

    flag: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A method of quantized weights. `lowest_sm` is the oldest chip that its GPU kernels run on; None: unknown, because
    the engine tells it only on a machine with a GPU."""

    name: str
    lowest_sm: str | None


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One implementation of attention that an engine can choose. A field is None if it is unknown, because the engine
    tells it only on a machine with a GPU."""

    name: str
    sms: tuple[str, ...] | None  # chips that it runs on; empty: it runs on a CPU
    kv_types: tuple[str, ...] | None  # empty: any
    dtypes: tuple[str, ...] | None  # of activations
    is_mla: bool | None  # True: only for models with a latent KV cache; False: only for models without


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What the engine's binary reports about itself."""

    version: str
    build: int
    commit: str  # empty: the build does not name its commit
    flags: tuple[str, ...]  # every spelling that --help lists, sorted
    kv_types: tuple[str, ...]
    kv_pairs: tuple[tuple[str, str], ...] = ()  # pairs with fast flash attention; empty: any pair of equal types
    backends: tuple[str, ...] = ()  # file names of the loadable backends, sorted
    split_modes: tuple[str, ...] = ()  # ways to split a model across GPUs
    # installed variants, the fastest last; empty: the engine has one build, or none
    cpu_variants: tuple[CpuVariant, ...] = ()
    choices: tuple[FlagChoices, ...] = ()  # accepted values of the flags that list them
    quantizations: tuple[Quantization, ...] = ()  # quantization methods of weights
    attention: tuple[AttentionBackend, ...] = ()
    tool_parsers: tuple[str, ...] = ()
    reasoning_parsers: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()  # name and version of the libraries that it is installed with and loads

    def choices_of(self, flag: str) -> tuple[str, ...]:
        """Return the values that `flag` accepts; empty if it accepts any value, or if there is no such flag."""
        return next((each.values for each in self.choices if each.flag == flag), ())


def runs_on(form: str, sm: str) -> bool:
    """True if machine code of a form (`80`, `90a`, `120f`) runs on the chip `sm`.

    Plain and `f`: same major, equal or higher minor, never from or to a Tegra. `a`: that chip alone.
    """
    own = form.rstrip("af")
    if form.endswith("a") or own in TEGRA or sm in TEGRA:
        return own == sm
    return own[:-1] == sm[:-1] and int(own) <= int(sm)


def folders_by_hand(models_dir: Path, repo: str | None) -> tuple[Path, ...]:
    """Return the folders in which people put a repository's files by hand: the models folder, and
    `publisher/repository` in it."""
    return (models_dir, models_dir / repo) if repo else (models_dir,)


def is_projector(path: str) -> bool:
    """True if the file's name is that of a multimodal projector: mmproj-F16.gguf, gemma-4-E4B-it-mmproj.gguf."""
    return "mmproj" in path.rpartition("/")[2].lower()


def dump_facts(facts: ImageFacts | EngineFacts) -> str:
    """Return JSON with sorted keys and a final newline, so that equal facts give equal bytes."""
    return _dumped(facts)


def dump_recipe(recipe: Recipe) -> str:
    """Return JSON with sorted keys and a final newline, so that equal recipes give equal bytes."""
    return _dumped(recipe)


def _dumped(facts: ImageFacts | EngineFacts | Recipe) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(facts)}, indent=1, sort_keys=True) + "\n"


def parse_image_facts(text: str) -> ImageFacts:
    """Return the facts in `text`. Raises ValueError if `dump_facts` did not write `text`."""
    return read(ImageFacts, _checked(text, "image facts"))


def parse_engine_facts(text: str) -> EngineFacts:
    """Return the facts in `text`. Raises ValueError if `dump_facts` did not write `text`."""
    return read(EngineFacts, _checked(text, "engine facts"))


def parse_recipe(text: str) -> Recipe:
    """Return the recipe in `text`. Raises ValueError if `dump_recipe` did not write `text`, or if the default names no
    variant."""
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
