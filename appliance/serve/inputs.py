"""What a start knows before it starts anything: image, engine, model, machine, settings, and the key of its profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import time

from appliance.engines.engine import Engine, Inputs, Install, Space, load
from appliance.errors import ConfigError, ModelDoesNotFitError
from appliance.image_facts import EngineFacts, ImageFacts, Recipe, parse_engine_facts, parse_image_facts, parse_recipe
from appliance.model import Model, digest, find_model, read_draft, read_model, with_projector
from appliance.plan import SPECULATION_GOALS, Kernels, KvCheck, MemoryKill, RuledOut, held_mib, most_mib, remembered
from appliance.probe import Cpu, Gpu, Hardware, count_oom_kills, probe
from appliance.profile import Key, ProfileStore, make_key
from appliance.serve.beside import check_named, sizes_beside, with_beside
from appliance.serve.checks import check_supported, usable_gpus
from appliance.serve.which import Located, Which, which_model
from appliance.settings import ENGINE_SETTINGS, NODES_MAX, Settings, hub_settings
from appliance.values import dataclass

_OUTSIDE = (
    "outside of an image there are none: `docker run --rm -i IMAGE` has this verb, or name a folder with copies of "
    "its /opt/appliance with --facts-dir"
)
OPT = Path("/opt")  # an image has its engine in a folder of the engine's name there


@dataclass(frozen=True, kw_only=True)
class StartInputs:
    """Made once; only the kernels may change, when a variant is ruled out."""

    engine: Engine
    install: Install
    inputs: Inputs
    key: Key
    warnings: tuple[str, ...] = ()  # of what this image leaves unused
    names: tuple[str, ...] = ()  # that mean the model in the API, beside its file's

    @property
    def settings(self) -> Settings:
        """With the engine's folder, also where that is the image's own."""
        return self.inputs.settings

    def space(self, kv_checks: Sequence[KvCheck] = ()) -> Space:
        """Raises ModelDoesNotFitError (31) with figures, ConfigError (10) for a setting that the engine cannot take."""
        return self.engine.space(self.inputs, kv_checks)

    def with_kernels(self, kernels: Kernels) -> StartInputs:
        key = Key(parts={**self.key.parts, "cpu_variant": kernels.variant})
        return replace(self, inputs=self.inputs.with_kernels(kernels), key=key)

    def with_memory_peaks(self, store: ProfileStore) -> StartInputs:
        """With what engines of earlier starts held of the GPUs, where they were seen to serve."""
        peaks = store.peaks(self.key, self.inputs.hardware.gpus.gpus)
        return replace(self, inputs=replace(self.inputs, memory_peaks=peaks))

    def memory_kills(self, store: ProfileStore) -> tuple[MemoryKill, ...]:
        """Those of earlier starts that count for this one."""
        usable_mib = self.inputs.hardware.memory.usable_mib
        return remembered(store.kills(self.key), now_s=time(), usable_mib=usable_mib)

    def after_memory_kills(self, kills: Sequence[MemoryKill]) -> StartInputs:
        """With plans that hold less host memory than those that the kernel's memory killer ended. Unchanged after too
        few kills, and where no smaller plan fits."""
        for most in most_mib(kills):
            less = replace(self, inputs=replace(self.inputs, host_mib_max=most))
            try:
                best = less.space().best
            except ModelDoesNotFitError:
                continue
            if held_mib(best, was_ready=True) <= most:  # weights that may stay on disk count and need no room
                return less
        return self

    def on(self, hardware: Hardware) -> StartInputs:
        """For the machine as another probe found it."""
        return replace(self, inputs=replace(self.inputs, hardware=hardware))


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the image holds: known before any model is looked at."""

    settings: Settings
    image: ImageFacts
    facts: EngineFacts
    engine: Engine
    recipe: Recipe | None = None

    def which_model(self, environment: Mapping[str, str]) -> Which:
        """Raises ConfigError (10) where nothing says which."""
        hub = cache(lambda: hub_settings(self.settings, environment))
        return which_model(self.settings, self.recipe, self.engine.model_format, hub)


def read_contents(settings: Settings) -> Contents:
    """Raises ConfigError (10) for a damaged image, and for a setting that means nothing to its engine."""
    image, facts = load_facts(settings)
    engine = load_engine(image)
    check_settings(settings, engine)
    check_named(settings)
    recipe = load_recipe(settings, image)
    return Contents(settings=settings, image=image, facts=facts, engine=engine, recipe=recipe)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the image finds, and may use of it."""

    hardware: Hardware
    install: Install
    kernels: Kernels
    warnings: tuple[str, ...]


def look_at_machine(contents: Contents, environment: Mapping[str, str]) -> Machine:
    """Raises what says that this image cannot run here (20 to 23)."""
    hardware = probe(contents.settings.data_dir, environment)
    return machine_of(contents, hardware, ruled_out=contents.engine.ruled_out)


def machine_of(
    contents: Contents, hardware: Hardware, *, ruled_out: Callable[[Path, ImageFacts, Cpu], RuledOut] | None = None
) -> Machine:
    """Of hardware that was looked at, or described: then nothing was ruled out on it. Raises as `look_at_machine`."""
    settings, image = contents.settings, contents.image
    warnings = check_supported(settings, image, hardware)
    install = install_of(settings, image, contents.facts, hardware)
    seen = ruled_out(install.cache_dir, image, hardware.cpu) if ruled_out else None
    kernels = contents.engine.choose_kernels(settings, contents.facts, hardware.cpu, seen)
    return Machine(hardware=hardware, install=install, kernels=kernels, warnings=warnings)


def read_inputs(settings: Settings, environment: Mapping[str, str], *, located: Located | None = None) -> StartInputs:
    """Looks at everything and refuses what cannot work. Writes nothing, starts nothing and fetches nothing.

    `located` where the model was chosen already. Raises ConfigError (10) for a model that would have to be fetched.
    """
    contents = read_contents(settings)
    machine = cache(partial(look_at_machine, contents, environment))
    return with_model(contents, located or locate(contents, environment, machine), machine)


def with_model(contents: Contents, located: Located, look: Callable[[], Machine]) -> StartInputs:
    """The model is read before the machine is looked at: what is wrong with it is the more likely mistake."""
    model = with_beside(read_located(located, contents.engine), contents.settings)
    machine = look()
    inputs = inputs_of(contents, machine, model)
    return StartInputs(
        engine=contents.engine,
        install=machine.install,
        inputs=inputs,
        key=key_of(inputs),
        warnings=machine.warnings,
        names=located.names,
    )


def inputs_of(contents: Contents, machine: Machine, model: Model) -> Inputs:
    settings = contents.settings
    if settings.mmproj == "off":
        model = replace(model, projector=None)
    if settings.engine_dir is None:
        sources = {**settings.sources, "engine_dir": "image"}
        settings = replace(settings, engine_dir=machine.install.engine_dir, sources=sources)
    if settings.alias is None and model.called:
        settings = replace(settings, alias=model.called, sources={**settings.sources, "alias": "name in its folder"})
    return Inputs(
        settings=settings,
        image=contents.image,
        facts=contents.facts,
        hardware=machine.hardware,
        model=model,
        kernels=machine.kernels,
        draft=read_draft_model(settings, model),
    )


def locate(contents: Contents, environment: Mapping[str, str], look: Callable[[], Machine]) -> Located:
    """On the volume. Raises ModelAwayError (10) where a start would fetch something first."""
    found = contents.which_model(environment)
    if isinstance(found, Located):
        return found
    from appliance.serve.candidates import locate_chosen  # here: a start whose model is named and here never needs it

    return locate_chosen(contents, found, environment, look)[0]


def key_of(inputs: Inputs) -> Key:
    """Of the profile that a start with these would want."""
    model, draft = inputs.model, inputs.draft
    return make_key(
        inputs.settings,
        inputs.image,
        inputs.hardware,
        digest(model.parts, model.header_bytes),
        digest(draft.parts, draft.header_bytes) if draft else None,
        gpus=used_gpus(inputs),
        cpu_variant=inputs.kernels.variant,
        beside=sizes_beside(model),
    )


def used_gpus(inputs: Inputs) -> tuple[Gpu, ...]:
    """Those that plans may use; all where none is looked at."""
    has_code = inputs.image.cuda is not None and inputs.settings.devices != "none"
    return usable_gpus(inputs.image, inputs.hardware) if has_code else inputs.hardware.gpus.gpus


def load_facts(settings: Settings) -> tuple[ImageFacts, EngineFacts]:
    """Raises ConfigError when the files of the image are missing or damaged."""
    try:
        image = parse_image_facts((settings.facts_dir / "image_facts.json").read_text(encoding="utf-8"))
        engine = parse_engine_facts((settings.facts_dir / "engine_facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"facts of this image cannot be read: {settings.facts_dir}: {error}"
        hint = "the image is damaged; build or pull it again" if settings.facts_dir.is_dir() else _OUTSIDE
        raise ConfigError(message, hint=hint) from error
    return image, engine


def load_engine(image: ImageFacts) -> Engine:
    """Raises ConfigError for an image whose engine this appliance cannot start."""
    return load(image.engine, said_by=f"{image.engine} {image.engine_version} ({image.cell})")


def check_settings(settings: Settings, engine: Engine) -> None:
    """Raises ConfigError (10) for one that was asked for and means nothing to this engine."""
    for name in sorted(ENGINE_SETTINGS - engine.settings):
        if settings.is_set(name):
            value, source = getattr(settings, name), settings.sources[name]
            message = f"setting {name} means nothing to the engine {engine.name}: '{value}' ({source})"
            raise ConfigError(message, hint=f"take it out; {engine.name} takes {', '.join(sorted(engine.settings))}")
    check_nodes(settings, engine)


def check_nodes(settings: Settings, engine: Engine) -> None:
    """Raises ConfigError (10) for a place among several hosts that cannot be."""
    nodes, rank, sources = settings.nodes, settings.node_rank, settings.sources
    if nodes > 1 and "nodes" not in engine.settings:
        message = f"engine {engine.name} serves a model on one host: setting nodes is '{nodes}' ({sources['nodes']})"
        hint = "start a replica on each host, with --nodes 1, behind a router: docs/clusters.md"
        raise ConfigError(message, hint=hint)
    if nodes > NODES_MAX:
        message = f"setting nodes is outside 1 to {NODES_MAX}: '{nodes}' ({sources['nodes']})"
        raise ConfigError(message, hint="make smaller groups, or serve alone: --nodes 1")
    if rank >= nodes:
        given = f"'{rank}' ({sources['node_rank']}), with nodes '{nodes}' ({sources['nodes']})"
        message = f"setting node_rank is outside 0 to {nodes - 1}: {given}"
        raise ConfigError(message, hint="number the hosts from 0, and give all of them the same --nodes")
    if nodes > 1 and settings.leader is None:
        message = f"setting leader is missing: host {rank} of {nodes} ({sources['nodes']}) must know who leads"
        raise ConfigError(message, hint="give all hosts the address of the one with --node-rank 0: --leader HOST")


def load_model(contents: Contents, environment: Mapping[str, str]) -> Model:
    """The one that a start would serve, where it is here."""
    located = locate(contents, environment, cache(partial(look_at_machine, contents, environment)))
    return with_beside(read_located(located, contents.engine), contents.settings)


def read_located(located: Located, engine: Engine) -> Model:
    model = read_model(located.path, serves=engine.model_format)
    return replace(with_projector(model, located.projector), called=located.called) if located.called else model


def load_recipe(settings: Settings, image: ImageFacts) -> Recipe | None:
    """None where this is no model image. Raises ConfigError when the recipe is missing or damaged."""
    if image.recipe is None:
        return None
    try:
        return parse_recipe((settings.facts_dir / "recipe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"recipe of this image cannot be read: {settings.facts_dir / 'recipe.json'}: {error}"
        raise ConfigError(message, hint="the image is damaged; build or pull it again") from error


def read_draft_model(settings: Settings, model: Model) -> Model | None:
    """The draft model of speculative decoding, refused here when it cannot be one, and not in the middle of a
    tuning."""
    if settings.draft_model is None or settings.speculation not in (*SPECULATION_GOALS, "draft"):
        return None
    request = settings.draft_model
    if find_model(request, settings.models_dir) is None:
        from appliance.weights.stores.stores import find_elsewhere  # here: a start from the volume must not pay for it

        stored = find_elsewhere(request, settings, "gguf")
        request = str(stored.path) if stored else request
    return read_draft(request, model, settings.models_dir, settings.sources["draft_model"])


def install_of(settings: Settings, image: ImageFacts, facts: EngineFacts, hardware: Hardware) -> Install:
    return Install(
        engine_dir=settings.engine_dir or OPT / image.engine,
        facts=facts,
        cache_dir=settings.data_dir / "cache" / image.build_id,
        driver_dir=hardware.gpus.driver_folder,
        stall_timeout_s=settings.stall_timeout_s,
        oom_kills=count_oom_kills,
    )


def query_key(settings: Settings, environment: Mapping[str, str]) -> Key:
    """Of the profile that a start here would want."""
    return read_inputs(settings, environment).key
