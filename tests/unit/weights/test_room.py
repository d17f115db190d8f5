"""Required free space, and partial files that will not be resumed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from appliance.errors import VolumeError
from appliance.weights.cache.download_set import WantedFile
from appliance.weights.cache.hub_layout import RepoFolder
from appliance.weights.download.disk_space import KEPT_S, bytes_missing, check_room, drop_orphans
from appliance.weights.download.locks import locked

KEYS = [letter * 64 for letter in "abcdef"]


@pytest.fixture
def folder(tmp_path: Path) -> RepoFolder:
    folder = RepoFolder(root=tmp_path, name="models--org--repo")
    folder.make()
    return folder


def file_of(key: str, size: int | None) -> WantedFile:
    return WantedFile(path=f"{key[0]}.gguf", bytes=size, sha256=key, url="https://hub/x")


def test_what_is_there_is_not_needed_again(folder: RepoFolder) -> None:
    whole, partial, cut, long, unknown, new = (
        file_of(key, size) for key, size in zip(KEYS, (100, 100, 100, 100, None, 7), strict=True)
    )
    folder.blob(whole.key).write_bytes(bytes(100))
    folder.partial(partial.key).write_bytes(bytes(30))
    folder.blob(cut.key).write_bytes(bytes(5))  # of another size: it is fetched anew
    folder.partial(long.key).write_bytes(bytes(300))
    assert [bytes_missing([file], folder) for file in (whole, partial, cut, long, unknown, new)] == [
        0,
        70,
        100,
        0,
        0,
        7,
    ]
    assert bytes_missing([whole, partial, cut, long, unknown, new], folder) == 177


def test_a_set_without_room_is_refused_with_figures(folder: RepoFolder) -> None:
    check_room([file_of(KEYS[0], 1)], folder, "org/repo")
    with pytest.raises(VolumeError, match=r"no room for org/repo: .* (?:MB|GB) free, 1,125.90 TB needed"):
        check_room([file_of(KEYS[0], 2**50)], folder, "org/repo")


async def test_what_somebody_works_on_stays(folder: RepoFolder) -> None:
    """A partial file of the hub's own client whose lock is held; with a free lock it is an orphan."""
    path = folder.blobs / f"{KEYS[0]}.0a1b2c3d.incomplete"
    path.write_bytes(bytes(10))
    async with locked(folder.lock(KEYS[0]), lambda: None):
        assert drop_orphans(folder, []) == 0
        assert path.exists()
    assert drop_orphans(folder, []) == 10
    assert not path.exists()


@pytest.mark.parametrize(
    ("age_s", "is_wanted", "stays"), [(60, False, True), (2 * KEPT_S, False, False), (2 * KEPT_S, True, True)]
)
def test_ours_stay_for_a_week_and_the_wanted_ones_longer(
    folder: RepoFolder, age_s: float, is_wanted: bool, stays: bool
) -> None:
    path = folder.partial(KEYS[0])
    path.write_bytes(bytes(10))
    os.utime(path, (time.time() - age_s,) * 2)
    drop_orphans(folder, [file_of(KEYS[0], 100)] if is_wanted else [])
    assert path.exists() == stays


def test_names_that_are_none_of_these_stay(folder: RepoFolder) -> None:
    names = ["x.incomplete", f"{KEYS[0]}.part", f"{KEYS[0]}.XYZ.incomplete", "sub folder.incomplete"]
    for name in names:
        path = folder.blobs / name
        path.write_bytes(b"?")
        os.utime(path, (0, 0))
    assert drop_orphans(folder, []) == 0
    assert sorted(path.name for path in folder.blobs.iterdir()) == sorted(names)
