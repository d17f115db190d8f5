"""What was found for one model on one machine, as it stands on the volume.

Keyed by the model's digest, the build id, the hardware and the settings that matter. The parts are kept beside their
hash, so that a profile that is not used can name the part that changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from appliance.documents import Rules, load, read
from appliance.engines.engine import load as load_engine
from appliance.errors import ConfigError
from appliance.image_facts import ImageFacts
from appliance.model import ModelDigest
from appliance.plan import Allocated, KvCheck, Launch, Plan, Speeds
from appliance.probe import Gpu, Hardware, fingerprint
from appliance.settings import Settings
from appliance.tune.figures.curve import Point
from appliance.tune.figures.measurement import Measurement
from appliance.tune.figures.speeds import measured_speeds, predicted_speeds
from appliance.tune.figures.workload import parse_mix
from appliance.values import dataclass

SCHEMA = 7
# For speed.
SETTINGS_THAT_MATTER = (
    "ctx_size", "devices", "draft_model", "engine_arg", "fill_minutes", "gpu_layers", "kv_type", "load_mode", "lora",
    "n_cpu_moe", "parallel", "pooling", "reserve_mib", "rope_scaling", "speculation", "threads", "ubatch", "users",
    "workload",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Key:
    """`parts` are flat: name -> value in words or numbers. `id` is the file's name."""

    parts: dict[str, Any]

    @property
    def id(self) -> str:
        text = json.dumps({"schema": SCHEMA, **self.parts}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def changed(self, other: dict[str, Any]) -> tuple[str, ...]:
        """Names of the parts that differ, with both values: "build: a1 -> b2"."""
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
    """`gpus` are those that the image can use: what else is in the machine changes nothing. None: all. `beside` is what
    is loaded with the model."""
    parts: dict[str, Any] = {"build": image.build_id, "model": digest.key, "cpu_variant": cpu_variant}
    parts |= {f"hardware.{name}": value for name, value in fingerprint(hardware, gpus).items()}
    parts |= {f"settings.{name}": getattr(settings, name) for name in SETTINGS_THAT_MATTER}
    if settings.nodes > 1:
        parts["settings.nodes"] = settings.nodes
    if draft is not None:
        parts["draft"] = draft.key
    parts |= beside or {}
    return Key(parts=json.loads(json.dumps(parts)))  # as it will be read back: tuples are lists there


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was found: the plan that was best for `mode`, and every other that was measured.

    `disturbance` says what spoilt the figures of the best: then the profile is provisional, and never replaces one that
    is not.
    """

    key: Key
    plan: Plan
    plans: tuple[Plan, ...]
    measurements: tuple[Measurement, ...]
    kv_checks: tuple[KvCheck, ...]  # on types of the KV cache below q8_0
    notes: tuple[str, ...]  # of speculative decoding and of slots: what was tried, in words
    mode: str
    workload: str  # as the setting says it
    native: int  # the largest context that counts
    job_s: float
    speed: str  # in words
    seconds: float
    stopped_by: str
    created: str  # ISO 8601, UTC
    allocated: Allocated | None = None
    disturbance: str | None = None
    disturbed_times: int = 0  # tunings in a row that it came of
    other_modes: tuple[str, ...] = ()  # what these want of other contexts was measured later
    gpu_uuids: tuple[str, ...] = ()  # which cards they were, in PCI order: to look up, never compared

    @property
    def prediction_error(self) -> float | None:
        """(predicted - allocated) / allocated over weights, caches and buffers everywhere, or over the KV cache where
        an engine tells of nothing else; None if nothing was read.

        Of the plan as it was measured: what speculates came later.
        """
        if self.allocated is None or not self.allocated.total:
            return None
        plan = next((plan for plan in self.plans if plan.key == self.plan.key), self.plan)
        predicted_mib = plan.predicted_mib if self.allocated.model else plan.predicted_kv_mib
        return (predicted_mib - self.allocated.total) / self.allocated.total


def speeds_document(plan: Plan | None, measured: Speeds | None) -> dict[str, Any]:
    """`measured` and `predicted`: the speeds of this plan, each None where there are none."""
    found = {"measured": measured, "predicted": predicted_speeds(plan) if plan else None}
    return {name: asdict(speeds) if speeds else None for name, speeds in found.items()}


def speeds_of(plan: Plan | None, profile: Profile | None) -> Speeds | None:
    """As measured, of any plan of the profile: made from its measurements, and not kept. None where it has none of
    this plan."""
    if plan is None or profile is None:
        return None
    return measured_speeds(plan, profile.measurements, parse_mix(profile.workload))


def speeds_told(plan: Plan | None, profile: Profile | None) -> dict[str, Any]:
    """All that documents and pages say of the speeds of the plan that serves, as numbers and in words. `from_profile`
    is True if the plan was measured, and its speeds are those of the profile."""
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
    """It may be a whole profile, of an older or newer appliance on the same volume."""


class OtherEngineError(OtherSchemaError):
    """The same, with plans of an engine that this appliance has not."""


def parse_profile(text: str) -> Profile:
    """Raises ValueError for everything that `dump_profile` of this schema did not write."""
    document = load(text)
    schema = document.pop("schema", None)
    if schema != SCHEMA:
        message = f"profile has another schema than {SCHEMA}: {schema}"
        raise OtherSchemaError(message)
    profile = read(Profile, document, rules=MEASURED, key=_parse_key, plan=parse_plan, plans=_parse_plans)
    parse_mix(profile.workload)
    return profile


def parse_plan(document: object) -> Plan:
    engine = document.get("engine") if isinstance(document, dict) else None
    if not isinstance(engine, str):
        message = f"Plan.engine is no text: {engine!r:.80}"
        raise ValueError(message)
    return read(Plan, document, launch=partial(read, _launch_of(engine)))


@cache
def _launch_of(engine: str) -> type[Launch]:
    """Of the engine of that name. Looked up once: a profile has many plans, and an engine is a folder."""
    try:
        return load_engine(engine).launch
    except ConfigError as error:
        message = f"profile is of an engine that this appliance has not: {engine[:80]!r}"
        raise OtherEngineError(message) from error


def _parse_plans(documents: object) -> tuple[Plan, ...]:
    if not isinstance(documents, list):
        message = f"Profile.plans is no list: {documents!r:.80}"
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
    """No engine takes no time, or for ever."""
    is_timed = 0 < point.decode_ms < math.inf and 0 <= point.prefill_ms < math.inf
    return is_timed and point.depth >= 0 and 1 <= point.noise_factor < math.inf


MEASURED: Rules = {Point: _is_timed}
