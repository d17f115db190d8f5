"""Converts a GGUF file into a folder of safetensors: `fetch NAME --safetensors`, and `made_of` rungs.

transformers reads GGUF and is in the image of the CPU build, so that a developer's machine needs no torch. The two
packages that transformers needs for it are hash-locked and lent to that one container.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from images import docker
from images.errors import BuildError, UsageError
from images.matrix.engines import VLLM
from images.recipes import fetch
from images.recipes.recipe import RungRow, Wheel

IMAGE = "appliance:vllm-cpu"
SCRIPT = Path("images/builder/gguf_to_safetensors.py")
READERS = "gguf-reader"  # the lock
PYTHON = f"{VLLM.folder}/bin/python"
SCRATCH = "/tmp"  # noqa: S108 - of the container, where nobody else is


def refuse_other(rung: RungRow) -> None:
    """Raises UsageError for anything but a single GGUF file."""
    if rung.format != "gguf" or len(rung.files) != 1:
        message = f"--safetensors converts one GGUF file, and {rung.name} is {len(rung.files)} of {rung.format}"
        raise UsageError(message, hint="name a rung of one GGUF file with --rung, or leave --safetensors out")


def to_safetensors(root: Path, gguf: Path, *, ca_bundle: Path | None, image: str = IMAGE) -> Path:
    """Converts into a folder next to the file, once, whole or not at all. Raises BuildError."""
    folder = gguf.with_suffix("")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=gguf.parent, prefix=".convert-") as name:
        work = Path(name)
        readers = _readers(root, work, ca_bundle)
        made = work / folder.name
        made.mkdir()
        done = docker.stream(run_argv(root, gguf, readers, made, image), cwd=root)
        if done.code or not (made / "config.json").is_file():
            message = f"GGUF was not converted: {gguf.name}: {image} ended with {done.code}"
            raise BuildError(message, hint="its own words are above; is the image here? images build --only vllm-cpu")
        return made.replace(folder)


def check(folder: Path, rung: RungRow) -> tuple[Path, ...]:
    """Returns the files of a converted rung, in order. Raises BuildError for one that differs from the recipe."""
    found = tuple(fetch.target_of(file, folder) for file in rung.files)
    for path, file in zip(found, rung.files, strict=True):
        hashed = fetch.sha256_of(path) if path.is_file() else "that is not there"
        if hashed != file.sha256:
            message = f"converted weights are not what was announced: {path}: sha256 {hashed}"
            raise BuildError(message, hint=f"expected {file.sha256}; remove {folder}, and it is made anew")
    return found


def run_argv(root: Path, gguf: Path, readers: Path, made: Path, image: str) -> tuple[str, ...]:
    """Returns the command. It runs as this user, so that the files are ours, and asks no registry for the image."""
    mounts = {root / SCRIPT: "/convert.py:ro", gguf: f"/in/{gguf.name}:ro", readers: "/readers:ro", made: "/out"}
    return (
        *("docker", "run", "--rm", "--pull", "never", "--network", "none", "--read-only", "--tmpfs", SCRATCH),
        *("--user", f"{os.getuid()}:0", "--env", f"HOME={SCRATCH}", "--env", "HF_HUB_OFFLINE=1"),
        *(word for source, target in mounts.items() for word in ("--volume", f"{source.resolve()}:{target}")),
        *("--entrypoint", PYTHON, image, "/convert.py", f"/in/{gguf.name}", "/out", "/readers"),
    )


def _readers(root: Path, work: Path, ca_bundle: Path | None) -> Path:
    """Unpacks the packages that transformers needs for GGUF. Both are pure Python."""
    wheels, readers = work / "wheels", work / "readers"
    wheels.mkdir()
    done = docker.stream(fetch.pip_argv(root, Wheel(lock=READERS, member=""), wheels, ca_bundle), cwd=root)
    found = sorted(wheels.glob("*.whl"))
    if done.code or not found:
        message = f"packages that read GGUF cannot be fetched: {READERS}: pip exited with code {done.code}"
        raise BuildError(message, hint="its own words are above; behind an intercepting proxy give --ca-bundle")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(readers)  # the lock's hashes were checked
    return readers
