"""A program of the tests, run with vLLM's own Python in its image; or with the Python files of a newer vLLM over it,
the one that the GPU images have. Its parsers need nothing of it that is compiled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import requests

IMAGE = os.environ.get("APPLIANCE_TEST_VLLM_IMAGE", "appliance:vllm-cpu")
FOR_CUDA = "appliance:vllm-cu130"
INDEX = "https://pypi.org/simple/vllm/"
NEWER = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
ROOT = Path(__file__).parents[3]
KEPT = ROOT / ".make"
DRIVER = ROOT / "images/templates/parts/vllm-driver.j2"
IMPORT_S = 300  # 12 s of CPU time; a cold disk and a busy machine take minutes


def needs_image(image: str = IMAGE) -> None:
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode:
        pytest.skip(f"{image} is not here: python -m images build --only {image.rpartition(':')[2]}")


def answered(program: Path, question: Any, *, newer: bool = False, model: Path | None = None) -> Any:
    """Run `program` in the image and return its last line, which follows its logs. The container has no network and is
    read-only. `newer` adds the Python files of `NEWER`; `model` is mounted as /model."""
    argv = ["docker", "run", "--rm", "-i", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/data"]
    argv += ["-v", f"{program}:/program.py:ro", *(["-v", f"{model}:/model:ro"] if model else [])]
    if newer:  # vLLM's own launcher sets the path
        argv += ["-v", f"{newer_python()}:/newer:ro", "-e", "PYTHONPATH=/newer:/opt/vllm/lib"]
    argv += ["--entrypoint", "python3" if newer else "/opt/vllm/bin/python", IMAGE, "/program.py"]
    done = subprocess.run(
        argv, input=json.dumps(question), capture_output=True, text=True, check=False, timeout=IMPORT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def answered_for_cuda(program: Path, question: Any) -> Any:
    """Run `program` in the CUDA image and return its answer. The stand-in for the driver is that of the image's
    build."""
    _, stand_in = DRIVER.read_text().split("\n", 1)
    argv = ["docker", "run", "--rm", "-i", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/data"]
    argv += ["--tmpfs", "/run/driver:exec,mode=1777", "-v", f"{program}:/program.py:ro", "--entrypoint", "sh", FOR_CUDA]
    argv += ["-c", f"{stand_in}/opt/vllm/bin/python /program.py"]
    done = subprocess.run(
        argv, input=json.dumps(question), capture_output=True, text=True, check=False, timeout=IMPORT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def newer_python() -> Path:
    """The folder with the package, of its source archive, and what it imports beyond the image's; fetched once and
    kept."""
    kept = KEPT / f"vllm-{NEWER}-python"
    if not kept.is_dir():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            archive = Path(folder) / "vllm.tar.gz"
            archive.write_bytes(_archive())
            with tarfile.open(archive) as opened:
                opened.extractall(folder, members=_package(opened), filter="data")
            _install("orjson", Path(folder) / f"vllm-{NEWER}")
            (Path(folder) / f"vllm-{NEWER}").rename(kept)
    return kept


def _archive() -> bytes:
    listed = requests.get(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"}, timeout=60)
    listed.raise_for_status()
    (url,) = [file["url"] for file in listed.json()["files"] if file["filename"] == f"vllm-{NEWER}.tar.gz"]
    found = requests.get(url, timeout=600)
    found.raise_for_status()
    assert hashlib.sha256(found.content).hexdigest() == SHA256, "not the archive that was read"
    return found.content


def _install(name: str, target: Path) -> None:
    """Install a package for the image's Python, in the version and with the hashes that the GPU images lock."""
    locked = re.search(rf"^{name}==(?:.*\\\n)*.*$", (ROOT / "images/locks/vllm-cu130.txt").read_text(), re.MULTILINE)
    assert locked, name
    (wanted := target / "wanted.txt").write_text(locked[0])
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target", str(target)]
    argv += ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_17_x86_64"]
    subprocess.run([*argv, "--requirement", str(wanted)], check=True, timeout=600)


def _package(opened: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    return (member for member in opened if member.name.startswith(f"vllm-{NEWER}/vllm/"))
