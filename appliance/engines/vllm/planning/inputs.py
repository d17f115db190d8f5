"""Facts of one start, and choices that follow from them and are the same for every plan. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.engine import Inputs
from appliance.engines.gpus import asked_for, judged
from appliance.engines.vllm.api.parsers import Parsers, parsers_of
from appliance.engines.vllm.planning.arguments.engine_args import Pins, read_pins
from appliance.engines.vllm.planning.arguments.variables import own_variables
from appliance.engines.vllm.planning.hosts import hosts_of, shm_of
from appliance.engines.vllm.planning.model.chips import Chip, chip_of
from appliance.engines.vllm.planning.model.kv_types import choose_kv_types
from appliance.engines.vllm.planning.model.precision import (
    attention_choice,
    check_attention,
    check_method,
    check_tokenizer,
    choose_dtype,
    gdn_choice,
    quantization_choice,
    tokenizer_choice,
)
from appliance.engines.vllm.planning.model.rope import overrides_for, unused_reach, wanted_context
from appliance.engines.vllm.planning.model.shape import Kind, Shape, shape_of
from appliance.engines.vllm.planning.observed_limits import NO_LIMITS, Limits
from appliance.errors import ConfigError, GpuUnusableError
from appliance.image_facts import ImageFacts
from appliance.plan import Choice, Speculation
from appliance.probe import Gpu, Hardware
from appliance.settings import Settings
from appliance.values import dataclass

_OLDEST = "75"  # assumed for a GPU of unknown compute capability: its limits hold on all newer ones


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts and fixed choices of one start. `cards` is empty if the CPU serves. `wanted` is the context length that was
    asked for, else the native one."""

    given: Inputs
    shape: Shape
    cards: tuple[Gpu, ...]
    chip: Chip
    pins: Pins
    parsers: Parsers  # of tool calls and reasoning
    dtype: str
    kv_type: str
    kv_types: tuple[str, ...]  # types that a plan may use, the predicted one first
    names_kv_type: bool  # True if the flag is needed even for the model's own type
    attention_backend: str | None
    gdn_backend: str | None
    hf_overrides: str | None
    variables: tuple[tuple[str, str], ...]
    wanted: int
    choices: tuple[Choice, ...]  # the same for every plan
    hosts: tuple[tuple[Gpu, ...], ...] = ()  # GPUs of each host of a group, this host first
    shm_mib: int | None = None  # smallest /dev/shm of all hosts; None: unknown
    limits: Limits = NO_LIMITS
    drafting: Speculation | None = None  # speculative decoding that all options include
    seqs: int | None = None  # requests in one step; None: those of the settings
    ignores_peaks: bool = False  # True if no plan would fit with the memory seen in service

    @property
    def settings(self) -> Settings:
        return self.given.settings

    @property
    def hardware(self) -> Hardware:
        return self.given.hardware

    @property
    def all_cards(self) -> tuple[Gpu, ...]:
        """GPUs of all hosts."""
        return tuple(card for host in self.hosts for card in host) if self.hosts else self.cards

    @property
    def has_prefix_cache(self) -> bool:
        return self.pins.has_prefix_cache is not False and not self.given.model.is_embedding_model

    @property
    def is_text_only(self) -> bool:
        return bool(self.pins.is_text_only) or (self.shape.has_vision and self.settings.mmproj == "off")

    def speculating(self, speculation: Speculation) -> Facts:
        """Return the facts with speculative decoding. For MTP the shape then includes the draft layers' weights and
        cache."""
        shape = self.shape
        if speculation.kind == "mtp":
            layer: Kind = "full"
            stored = shape.stored_bytes + shape.draft_bytes
            shape = replace(shape, stored_bytes=stored, kinds=(*shape.kinds, *(layer for _ in range(shape.drafts))))
        return replace(self, shape=shape, drafting=speculation)

    def with_limits(self, limits: Limits) -> Facts:
        return replace(self, limits=limits)


def read_facts(given: Inputs) -> Facts:
    """Return the facts of a start. Raises ConfigError (10), NoKernelError (20), CpuUnsupportedError (22),
    GpuUnusableError (23) or ModelUnreadableError (30) if no plan at all is possible."""
    settings, engine, model = given.settings, given.facts, given.model
    shape, pins = shape_of(model), read_pins(settings, engine)
    check_tokenizer(model, pins)
    check_method(model, shape, engine)
    cards, left_out = usable_cards(settings, given.image, given.hardware)
    chip = _weakest(cards, given.hardware, is_mla="mla" in shape.kinds)
    dtype, by_dtype = choose_dtype(shape, chip, pins)
    kv = choose_kv_types(settings, engine, chip, dtype, shape.quantization)
    check_attention(shape, chip, pins, engine)
    backend, by_attention = attention_choice(chip, kv.chosen, pins)
    gdn, by_gdn = gdn_choice(shape, chip, pins)
    by_weights = quantization_choice(shape, chip, pins, [_sm(gpu) for gpu in cards])
    wanted = wanted_context(settings, model)
    return Facts(
        given=given,
        shape=shape,
        cards=cards,
        chip=chip,
        pins=pins,
        parsers=parsers_of(model, engine, pins.passed),
        dtype=dtype,
        kv_type=kv.chosen,
        kv_types=kv.tried,
        names_kv_type=kv.is_named,
        attention_backend=backend,
        gdn_backend=gdn,
        hf_overrides=overrides_for(settings, model),
        variables=own_variables(settings),
        wanted=wanted,
        hosts=hosts_of(given, cards),
        shm_mib=shm_of(given),
        choices=tuple(
            each
            for each in (
                unused_reach(model),
                tokenizer_choice(model),
                by_dtype,
                by_weights,
                kv.choice,
                by_attention,
                by_gdn,
                *left_out,
            )
            if each
        ),
    )


def usable_cards(
    settings: Settings, image: ImageFacts, hardware: Hardware
) -> tuple[tuple[Gpu, ...], tuple[Choice, ...]]:
    """Return the GPUs to use, in PCI order or as asked for, and a choice for each GPU that is left out. Both are empty
    for a CPU image.

    A GPU image cannot serve on the CPU, so it raises GpuUnusableError (23) if no GPU is usable, and ConfigError (10) if
    `devices` is none or names a GPU that is not usable.
    """
    if image.cuda is None:
        return (), ()
    if settings.devices == "none":
        message = f"setting devices is 'none' ({settings.sources['devices']}), and {image.cell} serves on GPUs alone"
        raise ConfigError(message, hint=f"leave it out, or use the image {image.engine}-cpu")
    found = tuple(judged(hardware, image))
    usable = [gpu for gpu, why in found if why is None]
    left_out = tuple(
        Choice(name="left_out", value=_called(gpu), reason=why, source="probe", is_refusal=True)
        for gpu, why in found
        if why is not None
    )
    if not usable:
        passed_over = "; ".join(f"{each.value}: {each.reason}" for each in left_out)
        message = f"no GPU can be used, and {image.cell} serves on GPUs alone: {passed_over or 'none was given to it'}"
        hint = f"start the container with --gpus all, or use the image {image.engine}-cpu"
        raise GpuUnusableError(message, hint=hint)
    return asked_for(settings, usable), left_out


def _called(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name or 'unnamed'})"


def total_mib(gpu: Gpu, hardware: Hardware) -> float:
    return float(gpu.vram_total_mib or hardware.memory.total_mib)


def free_mib(gpu: Gpu, hardware: Hardware) -> float:
    """Return the free memory of a GPU, MiB. For a GPU without memory of its own it is the usable host memory."""
    return float(hardware.memory.usable_mib if gpu.is_unified else gpu.vram_free_mib or 0)


def _weakest(cards: tuple[Gpu, ...], hardware: Hardware, *, is_mla: bool) -> Chip:
    """Return the abilities of the oldest GPU, which all the others have too; of the CPU if there is no GPU."""
    if not cards:
        return chip_of(None, isa=hardware.cpu.isa, is_mla=is_mla)
    return chip_of(str(min(map(_sm, cards))), is_mla=is_mla)


def _sm(gpu: Gpu) -> int:
    return int((gpu.sm or _OLDEST).rstrip("af"))
