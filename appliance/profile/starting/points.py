"""The first plan of a machine without a profile: what was measured for its class before, else the prediction."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from appliance.engines.engine import Space
from appliance.errors import damaged_data
from appliance.plan import Plan
from appliance.profile.pick import Picked, pick
from appliance.profile.record import Key, Profile, parse_profile
from appliance.profile.store import ProfileStore
from appliance.values import dataclass

SHIPPED = Path(__file__).parent / "data"
# Parts of a key that may differ within a class of machines. Everything else has to be equal: model, CPU variant,
# settings, the CPU's name, instruction sets and cores, the GPUs with their bus and power limit.
MAY_DIFFER = frozenset({"build", "hardware.memory_mib", "hardware.driver"})


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A plan that was not measured here with this build. `profile` is where it was."""

    plan: Plan
    profile: Profile
    is_shipped: bool  # True if it came with the image, False if it was on the volume

    def describe(self) -> str:
        parts = self.profile.key.parts
        where = "shipped with this image" if self.is_shipped else "on this volume"
        cores = f"{parts.get('hardware.physical') or 'unknown'} cores"
        machine = f"{parts.get('hardware.cpu')}, {cores}, {parts.get('hardware.memory_mib'):,} MiB"
        return f"measured {self.profile.created} on {machine}, build {parts.get('build')}; {where}"


def first_plan(store: ProfileStore, key: Key, mode: str, space: Space, *, shipped: Path = SHIPPED) -> Foreign | None:
    """Return the best plan that fits now of the newest profile of this machine's class, on the volume or else shipped.

    None if there is no such profile, or if no plan of it fits. Only for machines without an own profile. Changes
    nothing.
    """
    on_volume = [(profile, False) for profile in store.alike(key, MAY_DIFFER)]
    in_image = [(profile, True) for profile in load_shipped(shipped) if profile.key.differs_only_in(key, MAY_DIFFER)]
    for profile, is_shipped in (*on_volume, *sorted(in_image, key=lambda each: each[0].created, reverse=True)):
        if profile.disturbance is not None:
            continue
        if isinstance(picked := pick(profile, mode, space), Picked):
            return Foreign(plan=picked.plan, profile=profile, is_shipped=is_shipped)
    return None


@cache
def load_shipped(folder: Path = SHIPPED) -> tuple[Profile, ...]:
    """Return the shipped profiles: files as `appliance profiles export` writes them. Raises ConfigError."""
    return tuple(_load(path) for path in sorted(folder.glob("*.json")))


def _load(path: Path) -> Profile:
    try:
        return parse_profile(path.read_text("utf-8"))
    except ValueError as error:
        raise damaged_data(path, error) from error
