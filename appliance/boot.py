"""The story of a start, one line a step: start reading here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from appliance.checks import check_devices, check_supported, why_fewer
from appliance.engines.engine import Engine, Inputs, Install, Space, load
from appliance.errors import ConfigError
from appliance.house import House, Prepared
from appliance.image_facts import EngineFacts, ImageFacts, parse_engine_facts, parse_image_facts
from appliance.model import Model, digest, read_draft, read_model, resolve_model
from appliance.plan import TASTES, Plan
from appliance.probe import Hardware, count_oom_kills, probe
from appliance.profile import Key, Picked, Profile, ProfileStatus, ProfileStore, make_key, pick
from appliance.report import Report
from appliance.settings import Settings
from appliance.supervisor import become_subreaper
from appliance.values import dataclass
from appliance.volume import open_volume

OPT = Path("/opt")  # an image has its engine in a folder of the engine's name there


async def boot(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """0 after a stop was asked for and everything is gone; raises FatalError for every other ending."""
    become_subreaper()
    house = open_house(settings, environment, report)
    house.adopt()  # with a profile the engine loads while the gateway is imported
    async with house.stoppable(), house.open_gateway() as gateway:
        if not house.has_engine:
            await house.prove_kernels()
            await doubt(house.hardware, environment, report)
            house.launch(await house.decide())
        await house.serve(gateway)
    return 0


async def measure_only(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """The story without serving: always measures, and keeps the profile. 143, as of SIGTERM, when it was stopped."""
    become_subreaper()
    house = open_house(settings, environment, report)
    async with house.stoppable():
        await house.tune_alone()
    return 143 if house.was_stopped else 0


def open_house(settings: Settings, environment: Mapping[str, str], report: Report) -> House:
    """Looks at everything, and refuses what cannot work."""
    image, _ = load_facts(settings)
    open_volume(settings.data_dir, image.build_id)
    found = prepare(settings, environment)
    vouch(settings, found, report)
    store = ProfileStore(settings.profiles_dir, lambda words: report.warning("profile_set_aside", words))
    return House(settings, environment, found, store, report)


def prepare(settings: Settings, environment: Mapping[str, str]) -> Prepared:
    """Writes nothing and starts nothing."""
    image, facts = load_facts(settings)
    engine = load_engine(image)
    model = load_model(settings, image)
    hardware = probe(settings.data_dir, environment)
    warnings = check_supported(settings, image, hardware)
    install = install_of(settings, image, facts, hardware)
    if settings.engine_dir is None:
        sources = {**settings.sources, "engine_dir": "image"}
        settings = replace(settings, engine_dir=install.engine_dir, sources=sources)
    ruled_out = engine.ruled_out(install.cache_dir, image, hardware.cpu)
    inputs = Inputs(
        settings=settings,
        image=image,
        facts=facts,
        hardware=hardware,
        model=model,
        kernels=engine.choose_kernels(settings, facts, hardware.cpu, ruled_out),
        draft=look_at_draft(settings, model),
    )
    drafting = digest(inputs.draft.parts, inputs.draft.header_bytes) if inputs.draft else None
    of_model = digest(model.parts, model.header_bytes)
    key = make_key(settings, image, hardware, of_model, drafting, cpu_variant=inputs.kernels.variant)
    return Prepared(engine=engine, install=install, inputs=inputs, key=key, warnings=warnings)


def load_model(settings: Settings, image: ImageFacts) -> Model:
    """The one that was asked for, else the image's own, else the only one there is."""
    return read_model(resolve_model(settings.model, image.recipe.file if image.recipe else None, settings.models_dir))


def load_engine(image: ImageFacts) -> Engine:
    """Raises ConfigError for an image whose engine this appliance cannot start."""
    return load(image.engine, said_by=f"{image.engine} {image.engine_version} ({image.cell})")


def install_of(settings: Settings, image: ImageFacts, facts: EngineFacts, hardware: Hardware) -> Install:
    return Install(
        engine_dir=settings.engine_dir or OPT / image.engine,
        facts=facts,
        cache_dir=settings.data_dir / "cache" / image.build_id,
        driver_dir=hardware.gpus.driver_folder,
        stall_timeout_s=settings.stall_timeout_s,
        oom_kills=count_oom_kills,
    )


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """What a start would serve: the plan, and the profile that it is from, if any, with how it stands."""

    plan: Plan
    found: Prepared
    space: Space
    profile: Profile | None = None
    standing: ProfileStatus | None = None


def foretell(settings: Settings, environment: Mapping[str, str]) -> Foretold:
    """Writes nothing and starts nothing."""
    found = prepare(settings, environment)
    store = ProfileStore(settings.profiles_dir, lambda _: None)
    profile = store.peek(found.key)
    verdicts = profile.verdicts if profile else ()
    space = found.space(verdicts)
    picked = pick(profile, settings.mode, space) if profile else None
    if profile is not None and isinstance(picked, Picked):
        standing = store.status(profile)
        return Foretold(plan=picked.plan, found=found, space=space, profile=profile, standing=standing)
    return Foretold(plan=found.predicted(verdicts), found=found, space=space)


def query_key(settings: Settings, environment: Mapping[str, str]) -> Key:
    """Of the profile that a start here would want."""
    return prepare(settings, environment).key


def look_at_draft(settings: Settings, model: Model) -> Model | None:
    """The model that is to guess ahead, refused here when it cannot, and not in the middle of a tuning."""
    if settings.draft_model is None or settings.speculation not in (*TASTES, "draft"):
        return None
    return read_draft(settings.draft_model, model, settings.models_dir, settings.sources["draft_model"])


def vouch(settings: Settings, found: Prepared, report: Report) -> None:
    """Says what is odd about the machine, and lets the engine itself vouch for its GPUs: it is started for that once.

    Raises GpuUnusableError when it sees none although there is one.
    """
    image, hardware = found.inputs.image, found.inputs.hardware
    for words in (*hardware.gpus.warnings, *found.warnings):
        report.warning("hardware", words)
    if image.cuda is None or not hardware.gpus.gpus or settings.devices == "none":
        return
    variant = found.inputs.kernels.variant
    devices = found.engine.query_devices(found.install, hardware, cpu_variant=variant, may_recall=True)
    check_devices(image, hardware, devices.names, devices.said)
    if fewer := why_fewer(image, hardware, devices.names):
        report.warning("hardware", fewer)


async def doubt(hardware: Hardware, environment: Mapping[str, str], report: Report) -> None:
    """Says where nvidia-smi contradicts NVML; before measuring only, since it may take seconds."""
    from appliance.probe.smi import cross_check  # here, since a start from a profile never needs its XML parser

    found = await asyncio.to_thread(cross_check, hardware.gpus, environment, hardware.volume.path)
    for words in found.warnings[len(hardware.gpus.warnings) :]:
        report.warning("hardware", words)


def load_facts(settings: Settings) -> tuple[ImageFacts, EngineFacts]:
    """Raises ConfigError when the files of the image are missing or damaged."""
    try:
        image = parse_image_facts((settings.facts_dir / "image_facts.json").read_text(encoding="utf-8"))
        engine = parse_engine_facts((settings.facts_dir / "engine_facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"facts of this image cannot be read: {settings.facts_dir}: {error}"
        raise ConfigError(message, hint="the image is damaged; build or pull it again") from error
    return image, engine
