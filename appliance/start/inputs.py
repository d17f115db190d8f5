"""The inputs of a start: image, engine, model, machine and settings, and the key of the profile that fits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import time

from appliance.abilities import digest_of
from appliance.engines.engine import Engine, Inputs, Install, Quantizer, Space
from appliance.errors import ModelDoesNotFitError
from appliance.model import Model, digest, find_model, read_draft, read_model, with_projector
from appliance.model.files.quantized import Quantization
from appliance.plan import SPECULATION_GOALS, Kernels, KvCheck, MemoryKill, held_mib, most_mib, remembered
from appliance.probe import Gpu, Hardware
from appliance.profile import Key, ProfileStore, make_key
from appliance.settings import Settings
from appliance.start.attachments import attachment_sizes, with_attachments
from appliance.start.checks import usable_gpus
from appliance.start.image import ImageContents
from appliance.start.machine import UsableMachine
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Located:
    """Weights that are here. `names` are what the API calls them, in addition to the file's own name."""

    path: Path
    names: tuple[str, ...] = ()
    called: str | None = None  # name given by the tool that stores it as a blob; `projector` is a blob, too
    projector: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StartInputs:
    """The complete inputs of planning, frozen: another machine or other kernels make another one."""

    engine: Engine
    install: Install
    inputs: Inputs
    key: Key
    warnings: tuple[str, ...] = ()  # what this image leaves unused
    names: tuple[str, ...] = ()  # what the API calls the model, in addition to its file's name
    quantization: Quantization | None = None  # None: the model was quantized before it came here, or must not be

    @property
    def settings(self) -> Settings:
        """The settings of this start; the engine's folder is always filled in."""
        return self.inputs.settings

    @property
    def abilities_digest(self) -> str:
        """Digest of what a model's abilities depend on beside the key of its profile."""
        settings, facts = self.inputs.settings, self.inputs.facts
        return digest_of(
            facts.version, facts.build, self.inputs.model.chat_template, settings.thinking, settings.reasoning_format,
            settings.engine_arg,
        )  # fmt: skip

    def space(self, kv_checks: Sequence[KvCheck] = ()) -> Space:
        """Build all plans.

        Raises ModelDoesNotFitError (31) with figures, ConfigError (10) if the engine cannot take a setting.
        """
        return self.engine.space(self.inputs, kv_checks)

    def with_kernels(self, kernels: Kernels) -> StartInputs:
        """Return the inputs for another CPU variant, under the key of that variant."""
        key = Key(parts={**self.key.parts, "cpu_variant": kernels.variant})
        return replace(self, inputs=self.inputs.with_kernels(kernels), key=key)

    def quantizer(self, target: Path) -> Quantizer:
        """Return the run that writes the quantized file to `target`. Only if `quantization` wants one."""
        wanted = self.quantization
        if wanted is None or wanted.kind is None:
            message = "nothing is to be quantized"
            raise RuntimeError(message)
        cores, variant = self.inputs.hardware.cpu.cores, self.inputs.kernels.variant
        make = self.engine.quantizer
        return make(self.install, wanted.origin.path, target, wanted.kind, threads=cores, cpu_variant=variant)

    def in_mode(self, mode: str) -> StartInputs:
        """Return the inputs for another mode, under the same key: a profile has the plans of all modes."""
        settings = self.inputs.settings
        sources = {**settings.sources, "mode": "switched while serving"}
        return replace(self, inputs=replace(self.inputs, settings=replace(settings, mode=mode, sources=sources)))

    def with_memory_peaks(self, store: ProfileStore) -> StartInputs:
        """Add the GPU memory that engines of earlier starts were seen to hold."""
        peaks = store.peaks(self.key, self.inputs.hardware.gpus.gpus)
        return replace(self, inputs=replace(self.inputs, memory_peaks=peaks))

    def memory_kills(self, store: ProfileStore) -> tuple[MemoryKill, ...]:
        """Return the kills of earlier starts that still count."""
        usable_mib = self.inputs.hardware.memory.usable_mib
        return remembered(store.kills(self.key), now_s=time(), usable_mib=usable_mib)

    def after_memory_kills(self, kills: Sequence[MemoryKill]) -> StartInputs:
        """Cap host memory below the plans that the kernel's memory killer ended.

        Returns the inputs unchanged after too few kills, or if no smaller plan fits.
        """
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
        """Return the inputs for the machine as a later probe found it, such as with other free memory."""
        return replace(self, inputs=replace(self.inputs, hardware=hardware))


def with_model(contents: ImageContents, located: Located, look: Callable[[], UsableMachine]) -> StartInputs:
    """Read the model, then look at the machine: an error in the model is the more likely one, so it is told first."""
    model = with_attachments(read_located(located, contents.engine), contents.settings)
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


def inputs_of(contents: ImageContents, machine: UsableMachine, model: Model) -> Inputs:
    """Return what the engine plans with; settings that the image or the model decides are filled in."""
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


def key_of(inputs: Inputs) -> Key:
    """Return the key of the profile that fits these inputs."""
    model, draft = inputs.model, inputs.draft
    return make_key(
        inputs.settings,
        inputs.image,
        inputs.hardware,
        digest(model.parts, model.header_bytes),
        digest(draft.parts, draft.header_bytes) if draft else None,
        gpus=used_gpus(inputs),
        cpu_variant=inputs.kernels.variant,
        beside=attachment_sizes(model),
    )


def used_gpus(inputs: Inputs) -> tuple[Gpu, ...]:
    """Return the GPUs that plans may use; all of them if this start looks at none."""
    has_code = inputs.image.cuda is not None and inputs.settings.devices != "none"
    return usable_gpus(inputs.image, inputs.hardware) if has_code else inputs.hardware.gpus.gpus


def read_located(located: Located, engine: Engine) -> Model:
    """Read the model's header. Raises ModelUnreadableError (30)."""
    model = read_model(located.path, serves=engine.model_format)
    return replace(with_projector(model, located.projector), called=located.called) if located.called else model


def read_draft_model(settings: Settings, model: Model) -> Model | None:
    """Read the draft model of speculative decoding; None without one.

    A file that cannot be a draft is refused here, before tuning spends its budget.
    """
    if settings.draft_model is None or settings.speculation not in (*SPECULATION_GOALS, "draft"):
        return None
    request = settings.draft_model
    if find_model(request, settings.models_dir) is None:
        from appliance.weights.stores.stores import find_elsewhere  # here: it would delay each start from the volume

        stored = find_elsewhere(request, settings, "gguf")
        request = str(stored.path) if stored else request
    return read_draft(request, model, settings.models_dir, settings.sources["draft_model"])
