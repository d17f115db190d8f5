"""License texts in an image: the engine's, those of CUDA's libraries, and one for each wheel. Pure.

A wheel brings its text in its dist-info. Those of the locks that do not were looked at, one by one, on 2026-11-21: all
198 of vLLM's, 176 of which name a License-File in their METADATA, and 22 wheels of which nine have none. They stand
here; one more fails `verify`, and so does one that brings a text again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from images import gate
from images.tree import Entry

FOLDER = "opt/appliance/licenses/"
TEXT = re.compile(r"(?:licen[cs]e|copying|notice)", re.IGNORECASE)
DIST_INFO = re.compile(r"^(?P<wheel>(?P<name>[^/]+)-[^/-]+\.dist-info)/")
CUDA_TEXT = re.compile(
    rf"^(?:{FOLDER}[^/]*(?:nvidia|cuda)[^/]*/.+|usr/share/doc/libcu[^/]+/copyright|"
    r"opt/vllm/lib/nvidia_[^/]+\.dist-info/(?:licenses/)?[^/]*[Ll]icense[^/]*)$"
)
# Where else a wheel has its text, below the folder that it was installed to; the first is the head of its one source.
IN_PACKAGE: Mapping[str, str] = {
    "nvidia_ml_py": "pynvml.py",
    "nvidia_cusparselt_cu13": "nvidia/cusparselt/LICENSE.txt",
}
# Under a license that is the same words for everybody, which Debian keeps in every image.
APACHE = "usr/share/common-licenses/Apache-2.0"
COMMON: Mapping[str, str] = {
    "model_hosting_container_standards": APACHE,
    "opentelemetry_semantic_conventions_ai": APACHE,
    "sentencepiece": APACHE,
    "tokenizers": APACHE,
}
# What its METADATA says instead. cuda-toolkit is a list of requirements and no more.
NOWHERE: Mapping[str, str] = {"cuda_toolkit": "nothing in it", "loguru": "MIT", "z3_solver": "MIT"}


@dataclass(frozen=True, kw_only=True)
class Found:
    """`missing`: what has no text and should. `silent`: wheels of which that is known, with what they say of it."""

    wheels: int
    missing: tuple[str, ...]
    silent: tuple[str, ...]
    outdated: tuple[str, ...]  # listed as silent, and not silent


def look(files: Mapping[str, Entry], *, engine: str, folders: Iterable[str]) -> Found:
    """`engine` is its title, `folders` are those that wheels were installed to, each with its last slash."""
    own = f"{FOLDER}{engine}/"
    missing = [] if any(path.startswith(own) and TEXT.search(path) for path in files) else [own]
    silent: list[str] = []
    outdated: list[str] = []
    count = 0
    for folder in folders:
        for wheel, name in sorted(_wheels(files, folder)):
            count += 1
            has_text = _has_text(files, folder, wheel, name)
            if name in NOWHERE:
                (outdated if has_text else silent).append(f"{name} ({NOWHERE[name]})")
            elif not has_text:
                missing.append(wheel)
    is_with_cuda = any(gate.TOOLKIT.match(path.rpartition("/")[2]) for path in files)
    if is_with_cuda and not any(CUDA_TEXT.match(path) for path in files):
        missing.append("CUDA's libraries")
    return Found(wheels=count, missing=tuple(missing), silent=tuple(silent), outdated=tuple(outdated))


def _wheels(files: Iterable[str], folder: str) -> set[tuple[str, str]]:
    inside = (DIST_INFO.match(path.removeprefix(folder)) for path in files if path.startswith(folder))
    return {(match["wheel"], match["name"]) for match in inside if match}


def _has_text(files: Mapping[str, Entry], folder: str, wheel: str, name: str) -> bool:
    own = f"{folder}{wheel}/"
    if any(path.startswith(own) and TEXT.search(path.removeprefix(own)) for path in files):
        return True
    elsewhere = (f"{folder}{IN_PACKAGE[name]}" if name in IN_PACKAGE else None, COMMON.get(name))
    return any(path in files for path in elsewhere)
