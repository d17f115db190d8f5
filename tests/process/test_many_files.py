"""Folders of more files than anybody has: only so many are looked at, and that is said."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.model import list_models
from appliance.weights.stores.stores import Store, find_stored, list_store

FIRST = "only the first 50,000 files and folders were listed"


def put(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        os.mknod(folder / f"f{number:06}")


def test_a_mounted_folder(tmp_path: Path) -> None:
    put(tmp_path, 100_000)
    store = Store(tool="folder", folder=tmp_path)
    assert list_store(store).problem == FIRST
    assert find_stored("m", (store,)) == ()


def test_a_cache_of_very_many_repositories(tmp_path: Path) -> None:
    for number in range(30_000):
        (tmp_path / f"models--org--m{number:05}").mkdir()
    assert list_store(Store(tool="Hugging Face", folder=tmp_path)).problem == FIRST


def test_the_volume(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    put(tmp_path, 60_000)
    put(tmp_path / "models--org--m/snapshots/main", 20_000)
    assert list_models(tmp_path) == (tmp_path / "a.gguf",)
