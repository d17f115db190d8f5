"""Location of the driver's libraries: folder layouts of container runtimes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe.gpu.driver import CUDA, NVML, PLACES, Found, find, reaching
from tests.unit.probe.machine import put

VOLUME = Path("/data")
ROOT = Path(__file__).parents[3]


def cache_of(*paths: str) -> str:
    """Return a cache in the form of ldconfig, without its tables: names and paths, each with a zero at its end."""
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
        str(tmp_path / "open"): "everyone may write there",
        str(tmp_path / "with;two"): "a separator",
        str(tmp_path / "x$LIB"): "a separator",
        "here": "it is a relative path",
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


TOO_LONG = "/" + "x" * 5000


@given(
    before=st.lists(st.sampled_from(["/usr", "/etc", "", ".", "/nowhere", "/proc/self", "/tmp", TOO_LONG])),
    folder=st.sampled_from([None, "/usr", "/c"]),
)
def test_a_child_searches_what_is_trusted_and_then_the_folder(before: list[str], folder: str | None) -> None:
    """/tmp is writable for everyone, and /proc is the volume in this test."""
    after = reaching({"LD_LIBRARY_PATH": ":".join(before), "X": "1"}, folder, Path("/proc"))
    trusted = [named for named in before if named in ("/usr", "/etc")]
    if folder and folder not in trusted:
        trusted.append(folder)
    assert after == {"X": "1"} | ({"LD_LIBRARY_PATH": ":".join(trusted)} if trusted else {})


@pytest.fixture
def untrusted(tmp_path: Path) -> list[str]:
    """Return folders that must not be trusted, all of them empty. `data` beside them is the volume."""
    for name in ("data/lib", "open", "with;two", "x$LIB"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data/lib")
    (tmp_path / "open").chmod(0o777)
    return [
        *(str(tmp_path / name) for name in ("data/lib", "link", "open", "with;two", "x$LIB", "data/../data")),
        "lib",
    ]


def test_a_child_does_not_search_what_is_refused(tmp_path: Path, untrusted: list[str]) -> None:
    for folder in untrusted:
        assert reaching({"LD_LIBRARY_PATH": folder}, None, tmp_path / "data") == {}
    good = tmp_path / "good"
    good.mkdir()
    everywhere = {"LD_LIBRARY_PATH": ":".join([*untrusted, str(good), *untrusted])}
    assert reaching(everywhere, "/driver", tmp_path / "data") == {"LD_LIBRARY_PATH": f"{good}:/driver"}
    assert reaching({"A": "1"}, None, None) == {"A": "1"}


def test_a_folder_that_cannot_be_looked_into_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    good = put(tmp_path / "good", {CUDA: ""})
    for odd in (TOO_LONG, f"{tmp_path}/loop", f"{tmp_path}/file/lib", f"{tmp_path}/none"):
        named = {"LD_LIBRARY_PATH": f"{odd}:{good}"}
        assert find(CUDA, tmp_path / "root", named, VOLUME) == Found(library=good / CUDA, folder=good)
        assert reaching(named, None, VOLUME) == {"LD_LIBRARY_PATH": str(good)}


# Imported before the change of user: the interpreter itself may lie where only root gets to.
AS_A_STRANGER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from appliance.probe.gpu.driver import CUDA, find, reaching
os.setgroups([])
os.setgid(0)
os.setuid(65533)
root, named = Path(sys.argv[2]), {"LD_LIBRARY_PATH": sys.argv[3]}
print(find(CUDA, root, named, Path("/data")), reaching(named, None, Path("/data")))
"""


def test_a_folder_that_this_user_may_not_enter_is_passed_over() -> None:
    """Example: /root/lib for --user 1000:0. A known place may also be inaccessible."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(prefix="driver", dir="/tmp") as name:  # pytest's own are closed to others
        root = Path(name)
        root.chmod(0o755)
        closed = put(root, {"closed/lib/libcuda.so.1": "", "usr/local/nvidia/lib64/none": ""}) / "closed"
        closed.chmod(0o700)
        (root / "usr/local/nvidia/lib").symlink_to(closed / "lib")
        argv = [sys.executable, "-B", "-c", AS_A_STRANGER, str(ROOT), name, f"{closed}/lib:{closed}:{root}/usr"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{Found()} {{'LD_LIBRARY_PATH': '{closed}:{root}/usr'}}\n", done.stderr
