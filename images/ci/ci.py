"""Jobs of .github/workflows/images.yml: one for each cell, with one build for each platform. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from images.matrix import render, space
from images.matrix.matrix import Cell, Platform
from images.pins import debian

JOBS_FILE = Path(".github/images.json")
# A platform is built on a machine of its own kind. Both names stand in pypa/cibuildwheel, .github/workflows/test.yml
# at 003db82b7dc1ee27a892668e4c6d4314362f4fed.
RUNNERS: dict[Platform, str] = {"linux/amd64": "ubuntu-24.04", "linux/arm64": "ubuntu-24.04-arm"}
# Seven minutes on two cores for the CPU backend, about half an hour for each SM of CUDA, and the export.
TIMEOUT_MINUTES = 60
# GitHub documents 14 GB for its standard Linux runners, of both kinds. Taking away the toolchains that nobody here asks
# for gives 20 GB and more back (llama.cpp's workflow does it for its CUDA images; figures of others go up to 60 GB).
RUNNER_MIB = 14 * 10**9 // 2**20
FREED_MIB = 20 * 10**9 // 2**20
CUDA_TIMEOUT_MINUTES = 180


IsLocked = Callable[[Cell, Platform], bool]


def jobs_file(cells: Iterable[Cell], is_locked: IsLocked = lambda cell, platform: True) -> str:
    """Returns the text of .github/images.json.

    A platform without a Debian lock is left out: it could only fail. A cell that no runner of the forge can hold is
    under `large`; the workflow builds those on the runner that the repository's variable LARGE_RUNNER names.
    """
    known = tuple(cells)
    too_big = {cell.id: _why_too_big(cell) for cell in known if space.total_mib(cell) > RUNNER_MIB + FREED_MIB}
    ready = [cell for cell in known if not cell.unresolved]
    locked = [replace(cell, platforms=tuple(p for p in cell.platforms if is_locked(cell, p))) for cell in ready]
    unlocked = {
        f"{cell.id} {platform}": f"no Debian lock of {cell.base.image}: {debian.LOCK_COMMAND} --platform {platform}"
        for cell in ready
        for platform in cell.platforms
        if not is_locked(cell, platform)
    }
    made = {
        "//": f"DO NOT EDIT. Made from build_matrix.yaml and images/ci/ci.py by: {render.RENDER_COMMAND}",
        "cells": [job(cell) for cell in locked if cell.platforms and cell.id not in too_big],
        "large": [job(cell) for cell in locked if cell.platforms and cell.id in too_big],
        "left_out": {cell.id: _why(cell) for cell in known if cell.unresolved} | too_big | unlocked,
    }
    return json.dumps(made, indent=2) + "\n"


def job(cell: Cell) -> dict[str, object]:
    """Returns the workflow's inputs. A platform's short name is also that of its cache and its step's output."""
    return {
        "cell": cell.id,
        "free_disk": space.total_mib(cell) > RUNNER_MIB,
        "timeout_minutes": CUDA_TIMEOUT_MINUTES if cell.target.cuda else TIMEOUT_MINUTES,
        "platforms": [
            {"platform": platform, "arch": platform.partition("/")[2], "runner": RUNNERS[platform]}
            for platform in cell.platforms
        ],
    }


def _why_too_big(cell: Cell) -> str:
    room = f"needs {space.total_mib(cell)} MiB, a runner has {RUNNER_MIB} and {FREED_MIB} more when it is cleared"
    return f"{room}; the variable LARGE_RUNNER names one that has enough"


def _why(cell: Cell) -> str:
    return f"no digest yet: {', '.join(base.image for base in cell.unresolved)}"
