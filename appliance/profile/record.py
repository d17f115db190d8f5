"""What was found for one model on one machine, as it stands on the volume.

Keyed by the model's digest, the build id, the hardware and the settings that matter. The parts are kept beside their
hash, so that a profile that is not used can name the part that changed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from appliance.engines.llama_server import Allocated
from appliance.image_facts import ImageFacts
from appliance.model import ModelDigest
from appliance.plan import Choice, Memory, Placement, Plan, Share, Speed
from appliance.probe import Hardware, fingerprint
from appliance.settings import Settings
from appliance.tune.search import Measurement, Point

SCHEMA = 1
# For speed.
SETTINGS_THAT_MATTER = (
    "ctx_size", "devices", "gpu_layers", "kv_type", "load_mode", "n_cpu_moe", "parallel", "threads", "ubatch"
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


def make_key(settings: Settings, image: ImageFacts, hardware: Hardware, digest: ModelDigest) -> Key:
    parts: dict[str, Any] = {"build": image.build_id, "model": digest.key}
    parts |= {f"hardware.{name}": value for name, value in fingerprint(hardware).items()}
    parts |= {f"settings.{name}": getattr(settings, name) for name in SETTINGS_THAT_MATTER}
    return Key(parts=json.loads(json.dumps(parts)))  # as it will be read back: tuples are lists there


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The best plan and how it was found."""

    key: Key
    plan: Plan
    measurements: tuple[Measurement, ...]
    job_s: float
    workload: str
    speed: str  # in words
    seconds: float
    stopped_by: str
    created: str  # ISO 8601, UTC
    allocated: Allocated | None = None
    gpu_uuids: tuple[str, ...] = ()  # which cards they were, in PCI order: to look up, never compared

    @property
    def prediction_error(self) -> float | None:
        """(predicted - allocated) / allocated over weights, caches and buffers everywhere; None if nothing was read."""
        if self.allocated is None or not self.allocated.total:
            return None
        return (self.plan.predicted_mib - self.allocated.total) / self.allocated.total


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
    return Profile(
        **{
            **_only(Profile, document),
            "key": key,
            "plan": _plan(document["plan"]),
            "measurements": tuple(_measurement(m) for m in document["measurements"]),
            "allocated": _allocated(document["allocated"]),
            "gpu_uuids": _texts("Profile.gpu_uuids", document.get("gpu_uuids", ())),
        }
    )


def _texts(name: str, found: Any) -> tuple[str, ...]:  # noqa: ANN401
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        message = f"{name} is not a list of texts: {found!r}"
        raise TypeError(message)
    return tuple(found)


def _plan(data: dict[str, Any]) -> Plan:
    speed = data.get("speed")
    return Plan(
        **{
            **_only(Plan, data),
            "memory": _memory(data["memory"]),
            "placement": _placement(data["placement"]) if "placement" in data else Placement(),
            "speed": None if speed is None else Speed(**_only(Speed, speed)),
            "choices": tuple(Choice(**_only(Choice, choice)) for choice in data["choices"]),
        }
    )


def _memory(data: dict[str, Any]) -> Memory:
    return Memory(**_only(Memory, data))


def _placement(data: dict[str, Any]) -> Placement:
    shares = tuple(Share(**{**_only(Share, share), "memory": _memory(share["memory"])}) for share in data["shares"])
    return Placement(**{**_only(Placement, data), "shares": shares})


def _measurement(data: dict[str, Any]) -> Measurement:
    points = tuple(Point(**_only(Point, point)) for point in data["points"])
    if not isinstance(data["error"], str | None):
        message = f"Measurement.error is not text: {data['error']!r}"
        raise TypeError(message)
    return Measurement(**{**_only(Measurement, data), "points": points, "allocated": _allocated(data["allocated"])})


def _allocated(data: dict[str, Any] | None) -> Allocated | None:
    if data is None:
        return None
    devices = tuple((str(name), float(size)) for name, size in data.get("devices", ()))
    return Allocated(**{**_only(Allocated, data), "devices": devices})


_SIMPLE: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_SIMPLE["int | None"] = (int, type(None))
_LATER = {
    "Profile": ("gpu_uuids",),
    "Plan": ("checkpoints", "placement", "speed"),
    "Memory": ("state", "checkpoints", "repacked", "mapped_twice"),
    "Measurement": ("variant",),
    "Allocated": ("recurrent", "mapped", "repacked", "devices"),
}


def _only(kind: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    """The fields of `kind`, the simple ones of their types: KeyError for a missing one, else TypeError. What came later
    than the first records has a default, and is not in the older ones."""
    if unknown := set(data) - {f.name for f in fields(kind)}:
        message = f"{kind.__name__} has no {', '.join(sorted(unknown))}"
        raise TypeError(message)
    there = [f for f in fields(kind) if f.name in data or f.name not in _LATER.get(kind.__name__, ())]
    for f in there:
        simple = _SIMPLE.get(str(f.type))
        if simple and not (isinstance(data[f.name], simple) and isinstance(data[f.name], bool) == (f.type == "bool")):
            message = f"{kind.__name__}.{f.name} is not {f.type}: {data[f.name]!r}"
            raise TypeError(message)
    return {f.name: data[f.name] for f in there}
