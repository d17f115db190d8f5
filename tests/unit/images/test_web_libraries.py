"""The libraries of the pages: taken from npm's tarballs by hash, and only the files that the lock names."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from images.builder import web_libraries
from images.layers.tree import Entry, Tree
from images.pins import web_lock
from images.proof import sbom

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "images/builder/web_libraries.py"
HOOKS = b'import{options as n}from"preact";export{n};\n//# sourceMappingURL=hooks.mjs.map\n'


def tarball_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


def library_of(data: bytes, **changes: Any) -> dict[str, Any]:
    body = web_libraries.for_pages(HOOKS)
    return {
        "name": "@scope/hooks",
        "version": "1.0.0",
        "license": "MIT",
        "url": "https://registry.npmjs.org/hooks/-/hooks-1.0.0.tgz",
        "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode(),
        "license_file": "LICENSE",
        "files": [{"path": "dist/hooks.mjs", "name": "hooks.module.js", "sha256": hashlib.sha256(body).hexdigest()}],
        **changes,
    }


def run(folder: Path, library: dict[str, Any], data: bytes) -> subprocess.CompletedProcess[str]:
    """Run the script as a build does, with the tarball at hand."""
    (folder / "hooks-1.0.0.tgz").write_bytes(data)
    (folder / "web.json").write_text(json.dumps({"libraries": [library]}))
    argv = [sys.executable, "-I", str(SCRIPT), str(folder / "web.json"), str(folder / "web"), str(folder / "texts")]
    return subprocess.run([*argv, "--tarballs", str(folder)], capture_output=True, text=True, check=False, timeout=60)


GOOD = tarball_of({"package/dist/hooks.mjs": HOOKS, "package/LICENSE": b"MIT", "package/evil.js": b"no"})


def test_only_the_named_files_are_taken_and_changed_for_pages(tmp_path: Path) -> None:
    done = run(tmp_path, library_of(GOOD), GOOD)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["hooks.module.js"]
    assert (
        tmp_path / "web/hooks.module.js"
    ).read_bytes() == b'import{options as n}from"./preact.module.js";export{n};\n'
    assert (tmp_path / "texts/scope-hooks/LICENSE").read_text() == "MIT"
    assert (tmp_path / "web/hooks.module.js").stat().st_mtime == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"integrity": "sha512-AAAA"}, "the lock has sha512-AAAA"),
        ({"license_file": "COPYING"}, "has no file COPYING"),
        ({"files": [{"path": "dist/none.js", "name": "none.js", "sha256": ""}]}, "has no file dist/none.js"),
        ({"files": [{"path": "dist/hooks.mjs", "name": "../x.js", "sha256": ""}]}, "is no plain file name"),
        ({"files": [{"path": "dist/hooks.mjs", "name": "x.js", "sha256": "0"}]}, "the lock has 0"),
        ({"files": None}, "error: the libraries of the pages cannot be had"),
    ],
)
def test_another_tarball_or_file_ends_the_build(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    if changes == {"files": None}:
        library = library_of(GOOD)
        del library["files"]
    else:
        library = library_of(GOOD, **changes)
    done = run(tmp_path, library, GOOD)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_paths_that_lead_out_of_a_tarball_lead_nowhere(tmp_path: Path) -> None:
    data = tarball_of({"package/dist/hooks.mjs": HOOKS, "package/LICENSE": b"MIT", "../../escaped": b"x"})
    assert run(tmp_path, library_of(data), data).returncode == 0
    assert not (tmp_path.parent / "escaped").exists()
    assert not (tmp_path / "escaped").exists()


def test_an_address_without_tls_is_refused() -> None:
    with pytest.raises(web_libraries.LibraryError, match="not an https address"):
        web_libraries.fetched("http://registry.npmjs.org/x.tgz", None)


def test_the_committed_lock_names_each_file_once_and_by_npms_address() -> None:
    found = web_lock.libraries(ROOT)
    names = [file.name for library in found for file in library.files]
    assert len(names) == len(set(names)) >= 8
    for library in found:
        assert library.url.startswith("https://registry.npmjs.org/")
        assert library.integrity.startswith("sha512-")
        assert library.license


def test_the_pages_load_only_what_the_lock_or_the_package_brings() -> None:
    """A page with a name that nothing brings would be blank in the image."""
    static = ROOT / "appliance/gateway/face/static"
    brought = {path.name for path in static.iterdir()}
    brought |= {file.name for library in web_lock.libraries(ROOT) for file in library.files}
    for path in static.iterdir():
        text = path.read_text()
        for word in ('"/assets/', 'from "./'):
            asked = [part.partition('"')[0] for part in text.split(word)[1:]]
            assert [name for name in asked if name not in brought] == []


def test_the_bill_of_materials_lists_them_with_licence_and_address() -> None:
    (library,) = [each for each in web_lock.libraries(ROOT) if each.name == "@picocss/pico"]
    path = "opt/appliance/web/pico.classless.min.css"
    entry = Entry(path=path, kind="file", mode=0o644, uid=0, gid=0, size_bytes=1, layer=1, sha256="a" * 64)
    tree = Tree(files={path: entry}, base={}, certificates={}, base_certificates=set())
    (found,) = sbom.page_libraries(tree, web_lock.libraries(ROOT))
    assert found.purl == f"pkg:npm/%40picocss/pico@{library.version}"
    assert (found.license, found.version) == ("MIT", library.version)
    assert "a" * 64 in (found.comment or "")


@pytest.mark.parametrize(
    "data", [b"", b"no tarball", GOOD[:60], GOOD[:40] + b"\0" * 40], ids=("empty", "text", "cut", "damaged")
)
def test_what_is_no_tarball_is_named(data: bytes) -> None:
    with pytest.raises(web_libraries.LibraryError, match="not a tarball"):
        web_libraries.members(data)
