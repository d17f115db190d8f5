"""What was found for one model on one machine, as it stands on the volume.

Keyed by the model's digest, the build id, the hardware and the settings that matter. The parts are kept beside their
hash, so that a profile that is not used can name the part that changed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable
from dataclasses import asdict, fields
from functools import cache
from typing import Any, cast

from appliance.engines.engine import load
from appliance.errors import ConfigError
from appliance.image_facts import ImageFacts
from appliance.model import ModelDigest
from appliance.plan import (
    KINDS,
    Allocated,
    Choice,
    Launch,
    Memory,
    Placement,
    Plan,
    Share,
    Speculation,
    Speed,
    Speeds,
    Verdict,
)
from appliance.probe import Hardware, fingerprint
from appliance.probe.conditions import parse_conditions
from appliance.settings import Settings
from appliance.tune.curve import Point
from appliance.tune.measurement import Measurement
from appliance.tune.speeds import measured_speeds, predicted_speeds
from appliance.tune.workload import parse_mix
from appliance.values import dataclass

SCHEMA = 5
# For speed.
SETTINGS_THAT_MATTER = (
    "ctx_size", "devices", "draft_model", "gpu_layers", "kv_type", "load_mode", "n_cpu_moe", "parallel", "speculation",
    "threads", "ubatch", "users", "workload",
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
    cpu_variant: str | None = None,
) -> Key:
    parts: dict[str, Any] = {"build": image.build_id, "model": digest.key, "cpu_variant": cpu_variant}
    parts |= {f"hardware.{name}": value for name, value in fingerprint(hardware).items()}
    parts |= {f"settings.{name}": getattr(settings, name) for name in SETTINGS_THAT_MATTER}
    if draft is not None:
        parts["draft"] = draft.key
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
    verdicts: tuple[Verdict, ...]  # on types of the KV cache below q8_0
    notes: tuple[str, ...]  # of guessing ahead and of slots: what was tried, in words
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
        """(predicted - allocated) / allocated over weights, caches and buffers everywhere; None if nothing was read.

        Of the plan as it was measured: what guesses ahead came later.
        """
        if self.allocated is None or not self.allocated.total:
            return None
        plan = next((plan for plan in self.plans if plan.key == self.plan.key), self.plan)
        return (plan.predicted_mib - self.allocated.total) / self.allocated.total


def speeds_document(plan: Plan | None, profile: Profile | None) -> dict[str, Any]:
    """`measured` and `predicted`: the speeds of this plan, each None where there are none. Any plan of the profile may
    be asked for; they are made from its measurements, and not kept."""
    predicted = predicted_speeds(plan) if plan else None
    found = {"measured": speeds_of(plan, profile), "predicted": predicted}
    return {name: asdict(speeds) if speeds else None for name, speeds in found.items()}


def speeds_of(plan: Plan | None, profile: Profile | None) -> Speeds | None:
    """As measured; None where this plan was not."""
    if plan is None or profile is None:
        return None
    return measured_speeds(plan, profile.measurements, parse_mix(profile.workload))


def dump_profile(profile: Profile) -> str:
    document = {"schema": SCHEMA, **asdict(profile)}
    document["key"] = {"id": profile.key.id, "parts": profile.key.parts}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


class OtherSchemaError(ValueError):
    """It may be a whole profile, of an older or newer appliance on the same volume."""


def parse_profile(text: str) -> Profile:
    """Raises ValueError for everything that `dump_profile` of this schema did not write."""
    try:
        document = json.loads(text)
        schema = document.pop("schema")
        if schema != SCHEMA:
            message = f"profile has another schema than {SCHEMA}: {schema}"
            raise OtherSchemaError(message)
        return _profile(document)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"profile lacks something: {type(error).__name__}: {error}"
        raise ValueError(message) from error


def _profile(document: dict[str, Any]) -> Profile:
    key = Key(parts=dict(document["key"]["parts"]))
    if key.id != document["key"]["id"]:
        message = "profile's key does not match its parts"
        raise ValueError(message)
    parse_mix(document["workload"])
    return Profile(
        **{
            **fields_of(Profile, document),
            "key": key,
            "plan": _plan(document["plan"]),
            "plans": tuple(_plan(plan) for plan in document["plans"]),
            "measurements": tuple(parse_measurement(m) for m in document["measurements"]),
            "other_modes": _texts("Profile.other_modes", document["other_modes"]),
            "verdicts": tuple(Verdict(**fields_of(Verdict, verdict)) for verdict in document["verdicts"]),
            "notes": _texts("Profile.notes", document["notes"]),
            "allocated": _allocated(document["allocated"]),
            "gpu_uuids": _texts("Profile.gpu_uuids", document["gpu_uuids"]),
        }
    )


def _texts(name: str, found: Any) -> tuple[str, ...]:  # noqa: ANN401
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        message = f"{name} is not a list of texts: {found!r}"
        raise TypeError(message)
    return tuple(found)


def _plan(data: dict[str, Any]) -> Plan:
    speed = data["speed"]
    return Plan(
        **{
            **fields_of(Plan, data),
            "memory": _memory(data["memory"]),
            "launch": _launch(data["engine"], data["launch"]),
            "placement": _placement(data["placement"]),
            "speed": None if speed is None else Speed(**fields_of(Speed, speed)),
            "speculation": _speculation(data["speculation"]),
            "choices": tuple(Choice(**fields_of(Choice, choice)) for choice in data["choices"]),
        }
    )


def _launch(engine: str, data: dict[str, Any]) -> Launch:
    """The engine's own. Raises TypeError for one that this appliance has not."""
    try:
        kind = load(engine).launch
    except ConfigError as error:
        raise TypeError(error.message) from error
    return kind(**fields_of(kind, data))


def _speculation(data: dict[str, Any] | None) -> Speculation | None:
    if data is None:
        return None
    if data["kind"] not in KINDS:
        message = f"Speculation.kind is none of {', '.join(KINDS)}: {data['kind']!r}"
        raise TypeError(message)
    return Speculation(**{**fields_of(Speculation, data), "adds": _memory(data["adds"])})


def _memory(data: dict[str, Any]) -> Memory:
    return Memory(**fields_of(Memory, data))


def _placement(data: dict[str, Any]) -> Placement:
    shares = tuple(Share(**{**fields_of(Share, share), "memory": _memory(share["memory"])}) for share in data["shares"])
    return Placement(**{**fields_of(Placement, data), "shares": shares})


def parse_measurement(data: dict[str, Any]) -> Measurement:
    points = tuple(_point(point) for point in data["points"])
    conditions = data["conditions"]
    return Measurement(
        **{
            **fields_of(Measurement, data),
            "points": points,
            "allocated": _allocated(data["allocated"]),
            "conditions": None if conditions is None else parse_conditions(conditions),
        }
    )


def _point(data: dict[str, Any]) -> Point:
    point = Point(**fields_of(Point, data))
    is_timed = 0 < point.decode_ms < math.inf and 0 <= point.prefill_ms < math.inf
    if not (is_timed and point.depth >= 0 and 1 <= point.noisier < math.inf):
        message = f"Point has times that no engine takes: {point}"
        raise TypeError(message)
    return point


def _allocated(data: dict[str, Any] | None) -> Allocated | None:
    if data is None:
        return None
    devices = tuple((str(name), float(size)) for name, size in data.get("devices", ()))
    return Allocated(**{**fields_of(Allocated, data), "devices": devices})


_SIMPLE: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_SIMPLE["int | None"] = (int, type(None))
_SIMPLE["float | None"] = (int, float, type(None))
_SIMPLE["str | None"] = (str, type(None))


def fields_of(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind`, the simple ones of their types: KeyError for a missing one, else TypeError."""
    types = _types_of(cast(Hashable, kind))
    if unknown := data.keys() - types.keys():
        message = f"{kind.__name__} has no {', '.join(sorted(unknown))}"
        raise TypeError(message)
    for name, (written, simple) in types.items():
        if simple and not (isinstance(data[name], simple) and isinstance(data[name], bool) == (written == "bool")):
            message = f"{kind.__name__}.{name} is not {written}: {data[name]!r}"
            raise TypeError(message)
    return {name: data[name] for name in types}


@cache
def _types_of(kind: Any) -> dict[str, tuple[str, tuple[type, ...] | None]]:  # noqa: ANN401 - a class
    """By name: the type as it is written, and what it is where it is a simple one."""
    return {field.name: (str(field.type), _SIMPLE.get(str(field.type))) for field in fields(kind)}
