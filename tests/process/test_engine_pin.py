"""`images pin` in a copy of the build half, against an index and an upstream that this test serves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from images.matrix import matrix
from images.pins import engine_pin, lock_sums

ROOT = Path(__file__).parents[2]
PINNED = next(cell.engine for cell in matrix.load(ROOT).cells if cell.engine.name == "llama")
SOURCE, COMMIT = "one\ntwo\nthree\n", "a1b2c3d4e" + "f" * 31
PATCH = "--- a/src/file.cpp\n+++ b/src/file.cpp\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
CMAKE = (
    "set(LLAMA_VERSION_MAJOR 0)\nset(LLAMA_VERSION_MINOR 6)\nset(LLAMA_VERSION_PATCH 1)\n"
    'option(LLAMA_BUILD_IS_DEV "llama: dev build" ON)\n'
)


def packed(version: str, source: str = SOURCE, commit: str = COMMIT, without: str = "") -> bytes:
    """Return a source distribution with the few files that are read, and one that must stay outside."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.2\nName: llama-cpp-python\nVersion: {version}\n",
        "pyproject.toml": "[build-system]\nrequires = []\n",
        "CHANGELOG.md": f"# Changes\n\n## [{version}]\n\n- update llama.cpp to ggml-org/llama.cpp@{commit[:9]}\n\n"
        f"## [0.0.1]\n\n- update llama.cpp to ggml-org/llama.cpp@{'0' * 9}\n",
        "vendor/llama.cpp/CMakeLists.txt": CMAKE,
        "vendor/llama.cpp/src/file.cpp": source,
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, text in files.items():
            if name == without:
                continue
            member = tarfile.TarInfo(f"llama_cpp_python-{version}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


@dataclass
class World:
    """The index and upstream's repository. `releases`: file name to content; `sums` replaces what the index says."""

    copy: Path
    address: str = ""
    releases: dict[str, bytes] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    yanked: set[str] = field(default_factory=set)
    page: object = None  # instead of the releases
    tags: str = f"{'b' * 40}\trefs/tags/b12000\n{COMMIT}\trefs/tags/b12345\n"

    def answer(self, path: str) -> tuple[str, bytes] | None:
        if path == "/simple/llama-cpp-python/":
            rows: list[dict[str, Any]] = [
                {
                    "filename": name,
                    "url": f"../../files/{name}",
                    "hashes": {"sha256": self.sums.get(name) or hashlib.sha256(content).hexdigest()},
                    "yanked": name in self.yanked,
                }
                for name, content in self.releases.items()
            ]
            if self.page is not None:
                return engine_pin.ANSWER, json.dumps(self.page).encode()
            page = {"meta": {"api-version": "1.0"}, "name": "llama-cpp-python", "files": rows}
            return engine_pin.ANSWER, json.dumps(page).encode()
        if path.startswith("/files/"):
            return "application/octet-stream", self.releases[path.removeprefix("/files/")]
        if path.startswith("/upstream/info/refs"):
            return "text/plain", self.tags.encode()
        return None

    def pin(self, *words: str) -> subprocess.CompletedProcess[str]:
        places = ("--index-url", f"{self.address}/simple", "--repository", f"{self.address}/upstream")
        return self.run(*places, *words)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The copy's build half with the project's other packages."""
        argv, environment = (sys.executable, "-m", "images", "pin", *words), {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, cwd=self.copy, env=environment, capture_output=True, text=True, check=False)

    def written(self) -> dict[str, bytes]:
        files = [self.copy / "build_matrix.yaml", *sorted((self.copy / "images/locks").iterdir())]
        return {str(path.relative_to(self.copy)): path.read_bytes() for path in files}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    copy = tmp_path / "project"
    shutil.copytree(ROOT / "images", copy / "images", ignore=shutil.ignore_patterns("__pycache__", "rendered"))
    text = (ROOT / "build_matrix.yaml").read_text("utf-8")
    begins, ends = text.index("    patches: [images/patches/llama-"), text.index("    # The engine picks the best one")
    (copy / "build_matrix.yaml").write_text(f"{text[:begins]}    patches: [images/patches/mine.patch]\n{text[ends:]}")
    (copy / "images/patches/mine.patch").write_text(PATCH)
    made = World(copy=copy)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = made.answer(self.path) or ("", b"")
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        made.address = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()
        thread.join()


def test_the_newest_release_is_pinned_and_locked(world: World) -> None:
    for version in ("0.9.9", "0.10.0"):  # by number, not by letter
        world.releases[f"llama_cpp_python-{version}.tar.gz"] = packed(version)
    for version in ("0.11.0rc1", "0.12.0"):
        world.releases[f"llama_cpp_python-{version}.tar.gz"] = b"never fetched"
    world.yanked = {"llama_cpp_python-0.12.0.tar.gz"}
    done = world.pin("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {name: told[name] for name in ("release", "version", "build", "commit", "is_new")} == {
        "release": "0.10.0",
        "version": "0.6.1-dev",
        "build": 12345,
        "commit": COMMIT,
        "is_new": True,
    }
    assert told["patches"] == [{"patch": "mine", "missed": {}}]
    cells = matrix.load(world.copy).cells
    engine = next(cell.engine for cell in cells if cell.engine.name == "llama")
    assert (engine.version, engine.build, engine.commit) == ("0.6.1-dev", 12345, COMMIT)
    assert engine.source.release == "0.10.0"
    sha256 = hashlib.sha256(world.releases["llama_cpp_python-0.10.0.tar.gz"]).hexdigest()
    assert (
        f"llama-cpp-python==0.10.0 \\\n    --hash=sha256:{sha256}"
        in world.written()["images/locks/llama-source.txt"].decode()
    )
    assert not any("127.0.0.1" in content.decode() for content in world.written().values())
    assert list(lock_sums.faults(world.copy)) == []


def changed_source(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0", source="one\nzwei\nthree\n")


def other_bytes(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0")
    world.sums = {"llama_cpp_python-9.0.tar.gz": "0" * 64}


def no_archive(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = b"not an archive"


def no_tag(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0", commit="c" * 40)


def no_commit(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0", commit="")


def no_changelog(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0", without="CHANGELOG.md")


def no_cmake(world: World) -> None:
    world.releases["llama_cpp_python-9.0.tar.gz"] = packed("9.0", without="vendor/llama.cpp/CMakeLists.txt")


def other_page(world: World) -> None:
    world.page = ["not", "a", "page"]


@pytest.mark.parametrize(
    ("plant", "code", "said"),
    [
        (changed_source, 61, "1 of 1 patches do not apply to llama.cpp 0.6.1-dev, build 12345, commit a1b2c3d4e"),
        (other_bytes, 61, "release 9.0 is not what the index names: SHA-256 "),
        (no_archive, 60, "release 9.0 cannot be unpacked"),
        (no_tag, 60, "is of the commit that the release carries: ccccccccc"),
        (no_commit, 60, "release 9.0 does not say which commit of llama.cpp it carries"),
        (no_changelog, 60, "release 9.0 does not say which commit of llama.cpp it carries"),
        (no_cmake, 60, "release 9.0 does not say llama.cpp's version where it is looked for"),
        (other_page, 60, "the index's answer is not a project page of PEP 691"),
        (lambda _: None, 60, "the index has no source of llama-cpp-python"),
    ],
    ids=["patch", "bytes", "archive", "tag", "commit", "changelog", "cmake", "page", "nothing"],
)
def test_what_cannot_be_pinned_is_named_and_nothing_is_written(
    world: World, plant: Callable[[World], None], code: int, said: str
) -> None:
    plant(world)
    before = world.written()
    done = world.pin()
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert world.written() == before
    if code == 61 and "patches" in said:
        assert "mine: does not apply: src/file.cpp (1 part)" in done.stdout


def test_the_pinned_release_is_left_and_a_folder_to_keep_must_be_new(world: World) -> None:
    release = PINNED.source.release
    world.releases[f"llama_cpp_python-{release}.tar.gz"] = b"never fetched"
    before = world.written()
    done = world.pin()
    assert (done.returncode, done.stdout) == (0, f"llama-cpp-python {release}: as it is pinned\n"), done.stderr
    assert world.written() == before
    done = world.pin("--keep", ".")
    assert done.returncode == 2
    assert "--keep names something that is there already" in done.stderr


def test_an_index_that_does_not_answer_is_named_without_its_address(world: World) -> None:
    done = world.run("--index-url", "http://me:secret@127.0.0.1:1/simple")
    assert (done.returncode, "secret" in done.stdout + done.stderr) == (60, False)
    assert "the package index cannot be asked: ConnectionError" in done.stderr
