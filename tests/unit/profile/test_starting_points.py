"""Starting points: which measured plan a machine without a profile serves first, and which one it never takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError
from appliance.profile import Key, Profile, ProfileStore, dump_profile
from appliance.profile.starting import Foreign, first_plan
from appliance.profile.starting.points import MAY_DIFFER, SHIPPED, load_shipped
from tests.unit.engines.llama.planning.test_plan_gpus import shape, space
from tests.unit.engines.llama.planning.test_plan_space import LAPTOP
from tests.unit.profile.test_profile_pick import MODEL, ladder, tuned

PARTS: dict[str, Any] = {
    "build": "b2", "model": "m1", "cpu_variant": "zen4", "hardware.cpu": "AMD EPYC", "hardware.threads_max": 4,
    "hardware.physical": 4, "hardware.isa": ["avx2"], "hardware.memory_mib": 24_000, "hardware.driver": "580",
    "hardware.gpus": [], "settings.users": 1,
}  # fmt: skip
HERE = Key(parts=PARTS)


def elsewhere(created: str = "2026-11-01T00:00:00+00:00", **parts: Any) -> Profile:
    """A profile of another build, with plans that fit on the laptop."""
    return replace(tuned(), key=Key(parts={**PARTS, "build": "b1", **parts}), created=created)


def found_by(store: ProfileStore, shipped: Path) -> Foreign | None:
    return first_plan(store, HERE, "speed", space(LAPTOP, shape(MODEL)), shipped=shipped)


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    (tmp_path / "profiles").mkdir()
    return ProfileStore(tmp_path / "profiles", pytest.fail)


def ship(folder: Path, *profiles: Profile) -> Path:
    folder = folder / "shipped"
    folder.mkdir()
    for profile in profiles:
        (folder / f"{profile.key.id}.json").write_text(dump_profile(profile))
    return folder


def test_without_any_there_is_none(store: ProfileStore, tmp_path: Path) -> None:
    assert found_by(store, ship(tmp_path)) is None


def test_what_was_measured_with_another_build_on_this_volume_is_served_first(
    store: ProfileStore, tmp_path: Path
) -> None:
    store.save(elsewhere())
    found = found_by(store, ship(tmp_path, elsewhere(created="2026-11-09T00:00:00+00:00")))
    assert found is not None
    assert (found.plan.key, found.is_shipped) == (ladder()[0].key, False)
    words = "measured 2026-11-01T00:00:00+00:00 on AMD EPYC, 4 cores, 24,000 MiB, build b1; on this volume"
    assert found.describe() == words


def test_of_the_shipped_ones_the_newest_is_taken(store: ProfileStore, tmp_path: Path) -> None:
    newer = elsewhere(created="2026-11-09T00:00:00+00:00", **{"hardware.memory_mib": 16_000, "hardware.driver": "570"})
    found = found_by(store, ship(tmp_path, elsewhere(), newer))
    assert found is not None
    assert (found.profile, found.is_shipped) == (newer, True)
    assert found.describe().endswith("; shipped with this image")


@pytest.mark.parametrize("part", sorted(PARTS.keys() - MAY_DIFFER))
def test_a_machine_of_another_class_gets_nothing(store: ProfileStore, tmp_path: Path, part: str) -> None:
    other = elsewhere(**{part: "another"})
    store.save(other)
    assert found_by(store, ship(tmp_path, other)) is None


def test_disturbed_figures_are_no_starting_point(store: ProfileStore, tmp_path: Path) -> None:
    other = replace(elsewhere(), disturbance="a backup ran", disturbed_times=1)
    store.save(other)
    assert found_by(store, ship(tmp_path, other)) is None


def test_a_profile_of_its_own_is_never_replaced(store: ProfileStore, tmp_path: Path) -> None:
    own = replace(elsewhere(), key=HERE)
    store.save(own)
    assert found_by(store, ship(tmp_path, own)) is not None  # shipped for this very build
    assert store.alike(HERE, MAY_DIFFER) == ()
    assert store.load(HERE) == own


def test_a_damaged_file_of_the_package_is_said(store: ProfileStore, tmp_path: Path) -> None:
    folder = ship(tmp_path)
    (folder / "cut.json").write_text(dump_profile(elsewhere())[:200])
    with pytest.raises(ConfigError, match=r"data of this package cannot be read: .*cut\.json"):
        found_by(store, folder)


def test_what_is_shipped_was_measured_undisturbed_and_names_no_card() -> None:
    for profile in load_shipped():
        assert (profile.disturbance, profile.gpu_uuids) == (None, ())
        assert profile.created
    for path in SHIPPED.glob("*.json"):
        document = json.loads(path.read_text())
        assert path.name == f"{document['key']['id']}.json"
