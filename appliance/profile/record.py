"""Result of tuning one model on one machine, as it is stored on the volume.

The key consists of the model's digest, the build id, the hardware and the settings that affect speed. The parts are
stored beside their hash, so that an unused profile can name the part that changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import cache, partial
from typing import Any

from appliance.documents import Rules, load, read
from appliance.engines.engine import load as load_engine
from appliance.errors import ConfigError
from appliance.image_facts import ImageFacts
from appliance.model import ModelDigest
from appliance.plan import Allocated, Checks, KvCheck, Launch, Plan, Speeds
from appliance.probe import Gpu, Hardware, fingerprint
from appliance.settings import Settings
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.speeds import measured_speeds, predicted_speeds
from appliance.tune.figures.workload import parse_mix
from appliance.values import dataclass

SCHEMA = 9
# Settings that change the speed, and so the key.
SETTINGS_THAT_MATTER = (
    "ctx_size", "devices", "draft_model", "draft_tokens", "engine_arg", "experts_used", "fill_minutes", "gpu_layers",
    "kv_type", "load_mode", "lora", "moe_slots", "n_cpu_moe", "parallel", "pooling", "reserve_mib", "rope_scaling",
    "speculation", "threads", "ubatch", "users", "workload",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Key:
    """Key of a profile. `parts` is flat: name -> text or number. `id` is the file's name."""

    parts: dict[str, Any]

    @property
    def id(self) -> str:
        text = json.dumps({"schema": SCHEMA, **self.parts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def differs_only_in(self, other: Key, names: frozenset[str]) -> bool:
        """True if no part differs but `names`. Equal keys do not differ at all, which is True too."""
        both = {*self.parts, *other.parts}
        return {name for name in both if self.parts.get(name) != other.parts.get(name)} <= names

    def changed(self, other: dict[str, Any]) -> tuple[str, ...]:
        """List the parts that differ, with both values: "build: a1 -> b2"."""
        names = sorted({*self.parts, *other})
        return tuple(f"{n}: {other.get(n)} -> {self.parts.get(n)}" for n in names if other.get(n) != self.parts.get(n))


def make_key(
    settings: Settings,
    image: ImageFacts,
    hardware: Hardware,
    digest: ModelDigest,
    draft: ModelDigest | None = None,
    *,
    gpus: Sequence[Gpu] | None = None,
    cpu_variant: str | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Key:
    """Make the key. `gpus` are those that the image can use (None: all); other GPUs do not change the key.

    `beside` describes what is loaded with the model, such as a projector.
    """
    parts: dict[str, Any] = {"build": image.build_id, "model": digest.key, "cpu_variant": cpu_variant}
    parts |= {f"hardware.{name}": value for name, value in fingerprint(hardware, gpus).items()}
    parts |= {f"settings.{name}": getattr(settings, name) for name in SETTINGS_THAT_MATTER}
    if settings.nodes > 1:
        parts["settings.nodes"] = settings.nodes
    if draft is not None:
        parts["draft"] = draft.key
    parts |= beside or {}
    return Key(parts=json.loads(json.dumps(parts)))  # as it will be read back: JSON turns tuples into lists


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Best plan for `mode` and every other measured plan.

    `disturbance` names what disturbed the figures of the best plan, None if nothing did. A disturbed profile is
    provisional and never replaces an undisturbed one.
    """

    key: Key
    plan: Plan
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]
    kv_checks: tuple[KvCheck, ...]  # of KV cache types below q8_0
    notes: tuple[str, ...]  # trials of drafts and slots, and pinned models that were there, in words
    mode: str
    workload: str  # as written in the setting
    native: int  # largest context length that is considered
    job_s: float
    speed: str  # in words
    seconds: float
    stopped_by: str
    created: str  # ISO 8601, UTC
    allocated: Allocated | None = None
    disturbance: str | None = None
    disturbed_times: int = 0  # disturbed tunings in a row, this one included
    other_modes: tuple[str, ...] = ()  # modes for which other context lengths were measured later
    goes_on_from: str | None = None  # day of UTC from which more is measured, in idle time; None: everything was
    checks: Checks = Checks()  # that were made after measuring
    gpu_uuids: tuple[str, ...] = ()  # cards in PCI order, for display; never compared

    @property
    def prediction_error(self) -> float | None:
        """(predicted - allocated) / allocated over weights, caches and buffers on all devices.

        Over the KV cache alone for an engine that reports nothing else. None if no allocation was read. The plan is
        taken without speculative decoding, which was added after the measurement.
        """
        if self.allocated is None or not self.allocated.total:
            return None
        plan = next((plan for plan in self.plans if plan.key == self.plan.key), self.plan)
        predicted_mib = plan.predicted_mib if self.allocated.model else plan.predicted_kv_mib
        return (predicted_mib - self.allocated.total) / self.allocated.total


def speeds_document(plan: Plan | None, measured: Speeds | None) -> dict[str, Any]:
    """Return `measured` and `predicted` speeds of this plan; each is None if unknown."""
    found = {"measured": measured, "predicted": predicted_speeds(plan) if plan else None}
    return {name: asdict(speeds) if speeds else None for name, speeds in found.items()}


def speeds_of(plan: Plan | None, profile: Profile | None) -> Speeds | None:
    """Measured speeds of a plan, computed from the profile's measurements. None if this plan was not measured."""
    if plan is None or profile is None:
        return None
    return measured_speeds(plan, profile.measurements, parse_mix(profile.workload))


def speeds_told(plan: Plan | None, profile: Profile | None) -> dict[str, Any]:
    """Everything that documents and pages show about the serving plan's speed, as numbers and in words.

    `from_profile` is True if the plan was measured, so that its speeds come from the profile.
    """
    measured = speeds_of(plan, profile)
    return {
        "speeds": speeds_document(plan, measured),
        "speed": measured.describe() if measured else None,
        "predicted_speed": plan.speed.describe() if plan and plan.speed else None,
        "from_profile": measured is not None,
    }


def dump_profile(profile: Profile) -> str:
    document = {"schema": SCHEMA, **asdict(profile)}
    document["key"] = {"id": profile.key.id, "parts": profile.key.parts}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


class OtherSchemaError(ValueError):
    """Profile of another schema: it may be a whole one, from an older or newer appliance on the same volume."""


class OtherEngineError(OtherSchemaError):
    """Profile with plans of an engine that this appliance does not have."""


def parse_profile(text: str) -> Profile:
    """Parse a profile. Raises ValueError if `dump_profile` of this schema did not write it."""
    document = load(text)
    schema = document.pop("schema", None)
    if schema != SCHEMA:
        message = f"profile schema is {schema}, expected {SCHEMA}"
        raise OtherSchemaError(message)
    profile = read(Profile, document, rules=MEASURED, key=_parse_key, plan=parse_plan, plans=_parse_plans)
    parse_mix(profile.workload)
    return profile


def parse_plan(document: object) -> Plan:
    engine = document.get("engine") if isinstance(document, dict) else None
    if not isinstance(engine, str):
        message = f"Plan.engine is not a string: {engine!r:.80}"
        raise ValueError(message)
    return read(Plan, document, launch=partial(read, _launch_of(engine)))


@cache
def _launch_of(engine: str) -> type[Launch]:
    """Launch class of this engine. Cached: a profile has many plans, and loading an engine imports a package."""
    try:
        return load_engine(engine).launch
    except ConfigError as error:
        message = f"profile is of an engine that this appliance does not have: {engine[:80]!r}"
        raise OtherEngineError(message) from error


def _parse_plans(documents: object) -> tuple[Plan, ...]:
    if not isinstance(documents, list):
        message = f"Profile.plans is not a list: {documents!r:.80}"
        raise ValueError(message)
    return tuple(parse_plan(document) for document in documents)


def _parse_key(document: object) -> Key:
    written = read(_WrittenKey, document)
    key = Key(parts=written.parts)
    if key.id != written.id:
        message = "profile's key does not match its parts"
        raise ValueError(message)
    return key


@dataclass(frozen=True, kw_only=True)
class _WrittenKey:
    id: str
    parts: dict[str, Any]


def _is_timed(point: Point) -> bool:
    """True if the times are positive and finite, as every real measurement's are."""
    is_timed = 0 < point.decode_ms < math.inf and 0 <= point.prefill_ms < math.inf
    return is_timed and point.depth >= 0 and 1 <= point.noise_factor < math.inf


def _is_day(day: str) -> bool:
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False


MEASURED: Rules = {
    Point: _is_timed,
    Profile: lambda profile: profile.goes_on_from is None or _is_day(profile.goes_on_from),
}
