"""What a start knows before it starts anything: image, engine, model, machine, settings, and the key of its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from appliance.engines.engine import Engine, Inputs, Install, Space, load
from appliance.errors import ConfigError
from appliance.image_facts import EngineFacts, ImageFacts, parse_engine_facts, parse_image_facts
from appliance.model import Format, Model, digest, find_model, only_model, read_draft, read_model
from appliance.plan import SPECULATION_GOALS, Kernels, KvCheck
from appliance.probe import Gpu, Hardware, count_oom_kills, probe
from appliance.profile import Key, make_key
from appliance.serve.checks import check_supported, usable_gpus
from appliance.settings import ENGINE_SETTINGS, Settings
from appliance.values import dataclass

OPT = Path("/opt")  # an image has its engine in a folder of the engine's name there


@dataclass(frozen=True, kw_only=True)
class StartInputs:
    """Made once; only the kernels may change, when a variant is ruled out."""

    engine: Engine
    install: Install
    inputs: Inputs
    key: Key
    warnings: tuple[str, ...] = ()  # of what this image leaves unused

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

    def on(self, hardware: Hardware) -> StartInputs:
        """For the machine as another probe found it."""
        return replace(self, inputs=replace(self.inputs, hardware=hardware))


def read_inputs(settings: Settings, environment: Mapping[str, str]) -> StartInputs:
    """Looks at everything and refuses what cannot work. Writes nothing and starts nothing."""
    image, facts = load_facts(settings)
    engine = load_engine(image)
    check_settings(settings, engine)
    model = load_model(settings, image, engine)
    hardware = probe(settings.data_dir, environment)
    warnings = check_supported(settings, image, hardware)
    install = install_of(settings, image, facts, hardware)
    if settings.engine_dir is None:
        sources = {**settings.sources, "engine_dir": "image"}
        settings = replace(settings, engine_dir=install.engine_dir, sources=sources)
    if settings.alias is None and model.called:
        settings = replace(settings, alias=model.called, sources={**settings.sources, "alias": "name in its folder"})
    ruled_out = engine.ruled_out(install.cache_dir, image, hardware.cpu)
    inputs = Inputs(
        settings=settings,
        image=image,
        facts=facts,
        hardware=hardware,
        model=model,
        kernels=engine.choose_kernels(settings, facts, hardware.cpu, ruled_out),
        draft=read_draft_model(settings, model),
    )
    return StartInputs(engine=engine, install=install, inputs=inputs, key=_key_of(inputs), warnings=warnings)


def _key_of(inputs: Inputs) -> Key:
    model, draft = inputs.model, inputs.draft
    return make_key(
        inputs.settings,
        inputs.image,
        inputs.hardware,
        digest(model.parts, model.header_bytes),
        digest(draft.parts, draft.header_bytes) if draft else None,
        gpus=used_gpus(inputs),
        cpu_variant=inputs.kernels.variant,
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
        raise ConfigError(message, hint="the image is damaged; build or pull it again") from error
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


def load_model(settings: Settings, image: ImageFacts, engine: Engine) -> Model:
    """The one that was asked for, else the image's own, else the only one there is of the engine's format: on the
    volume, else in mounted folders of other tools."""
    file, serves = image.recipe.file if image.recipe else None, engine.model_format
    path = _on_volume(settings, file, serves)
    if path is not None:
        return read_model(path, serves=serves)
    # here: a start from the volume must not pay for it
    from appliance.weights.stores import find_elsewhere, read_elsewhere, read_stored

    if settings.model or not file:
        return read_elsewhere(settings, serves)
    if stored := find_elsewhere(file, settings, serves):
        return read_stored(stored, serves)
    message = f"the model of this image's recipe is not on the volume: {settings.models_dir / file}"
    raise ConfigError(message, hint="fetch it there, or name another with APPLIANCE_MODEL")


def _on_volume(settings: Settings, file: str | None, serves: Format) -> Path | None:
    if settings.model:
        return find_model(settings.model, settings.models_dir)
    if file:
        return settings.models_dir / file if (settings.models_dir / file).exists() else None
    return only_model(settings.models_dir, serves=serves)


def read_draft_model(settings: Settings, model: Model) -> Model | None:
    """The draft model of speculative decoding, refused here when it cannot be one, and not in the middle of a
    tuning."""
    if settings.draft_model is None or settings.speculation not in (*SPECULATION_GOALS, "draft"):
        return None
    request = settings.draft_model
    if find_model(request, settings.models_dir) is None:
        from appliance.weights.stores import find_elsewhere  # here: a start from the volume must not pay for it

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
