"""Where the driver's libraries lie: layouts of container runtimes as folders of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import put

from appliance.probe.driver import CUDA, NVML, PLACES, Found, find, reaching

VOLUME = Path("/data")


def cache_of(*paths: str) -> str:
    """As ldconfig writes it, but for its tables: names and paths, each with a zero at its end."""
    return "glibc-ld.so.cache1.1" + "".join(f"{Path(path).name}\0{path}\0" for path in paths)


@pytest.mark.parametrize(
    "files",
    [
        {"/usr/lib/x86_64-linux-gnu/libcuda.so.1": ""},  # NVIDIA's legacy hook on Debian
        {"/usr/lib/aarch64-linux-gnu/libcuda.so.1": ""},
        {  # its CDI hook on WSL 2
            "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1": "",
            "/etc/ld.so.cache": cache_of("/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1"),
        },
    ],
)
def test_what_the_loader_finds_by_itself_needs_no_telling(tmp_path: Path, files: dict[str, str]) -> None:
    library = tmp_path / next(iter(files)).lstrip("/")
    assert find(CUDA, put(tmp_path, files), {}, VOLUME) == Found(library=library)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.folder)
def test_where_runtimes_mount_it_without_telling_the_loader(tmp_path: Path, place: object) -> None:
    folder = tmp_path / place.folder  # type: ignore[attr-defined]
    put(folder, {CUDA: "", NVML: ""})
    put(tmp_path, {"/etc/ld.so.cache": cache_of("/usr/lib/x86_64-linux-gnu/libcuda.so.1")})  # stale: it is not there
    for name in (CUDA, NVML):
        assert find(name, tmp_path, {}, VOLUME) == Found(library=folder / name, folder=folder)


def test_what_the_user_names_comes_first_as_in_the_loader(tmp_path: Path) -> None:
    put(tmp_path, {"compat/libcuda.so.1": "newer", "usr/lib/x86_64-linux-gnu/libcuda.so.1": "older"})
    named = {"LD_LIBRARY_PATH": f":/nowhere:{tmp_path}/compat:"}
    assert find(CUDA, tmp_path, named, VOLUME).folder == tmp_path / "compat"
    same = {"LD_LIBRARY_PATH": str(tmp_path / "usr/lib/x86_64-linux-gnu")}
    assert find(CUDA, tmp_path, same, VOLUME).folder is None


def test_no_library_is_nowhere(tmp_path: Path) -> None:
    assert find(CUDA, tmp_path, {"LD_LIBRARY_PATH": "/nowhere"}, VOLUME) == Found()


def test_neither_the_volume_nor_what_depends_on_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, {f"{folder}/libcuda.so.1": "" for folder in ("data/lib", "here", "open", "with;two", "x$LIB")})
    (tmp_path / "link").symlink_to(tmp_path / "data/lib")
    (tmp_path / "open").chmod(0o777)
    monkeypatch.chdir(tmp_path)
    refused = {
        str(tmp_path / "data/lib"): "it is on the volume",
        str(tmp_path / "link"): "it is on the volume",
        str(tmp_path / "open"): "everybody may write there",
        str(tmp_path / "with;two"): "another one",
        str(tmp_path / "x$LIB"): "another one",
        "here": "it is relative",
    }
    for folder, why in refused.items():
        found = find(CUDA, tmp_path / "root", {"LD_LIBRARY_PATH": folder}, tmp_path / "data")
        assert (found.library, found.folder) == (None, None)
        assert [why in words and folder in words for words in found.refused] == [True]
    everywhere = {"LD_LIBRARY_PATH": ":".join(refused)}
    good = put(tmp_path / "root", {"usr/local/nvidia/lib64/libcuda.so.1": ""}) / "usr/local/nvidia/lib64"
    assert find(CUDA, tmp_path / "root", everywhere, tmp_path / "data").folder == good


def test_a_known_folder_that_leads_to_the_volume_is_not_used(tmp_path: Path) -> None:
    put(tmp_path, {"data/lib/libcuda.so.1": ""})
    (tmp_path / "usr/local/nvidia").mkdir(parents=True)
    (tmp_path / "usr/local/nvidia/lib64").symlink_to(tmp_path / "data/lib")
    assert find(CUDA, tmp_path, {}, tmp_path / "data") == Found()


@given(before=st.lists(st.sampled_from(["/a", "/b", ""])), folder=st.sampled_from([None, "/a", "/c"]))
def test_a_folder_is_added_once_and_last(before: list[str], folder: str | None) -> None:
    environment = {"LD_LIBRARY_PATH": ":".join(before), "X": "1"}
    after = reaching(environment, folder)
    words = after["LD_LIBRARY_PATH"].split(":")
    assert folder is None or folder in words
    assert words[: len(before)] == before or not any(before)
    assert reaching(after, folder) == after
