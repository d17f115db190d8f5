"""Recognise files in a models folder that cannot be served as they are, by their names.

These are incomplete split models, pieces of a file that was cut by bytes, unfinished downloads, projectors without a
model, and empty folders made by Docker.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from appliance.errors import ConfigError, FatalError, ModelUnreadableError, printable
from appliance.image_facts import is_projector
from appliance.model.formats.entries import ENTRIES_LIMIT
from appliance.model.formats.parts import PART, PARTS_LIMIT
from appliance.model.formats.safetensors import missing_weights
from appliance.system.disk import hint_of_empty
from appliance.values import dataclass

_DEPTH = 2
# Names of pieces, given by people or by `split`, with their position: x.gguf.part1of2, x.part1of2.gguf, x.gguf-split-a,
# x.gguf.001, x.gguf.part1, x.gguf.aa.
_PIECES = (
    re.compile(r"(?P<file>.+\.gguf)[._-]part[._-]?(?P<at>\d+)[._-]?of[._-]?(?P<of>\d+)", re.IGNORECASE),
    re.compile(r"(?P<stem>.+)[._-]part[._-]?(?P<at>\d+)[._-]?of[._-]?(?P<of>\d+)\.gguf", re.IGNORECASE),
    re.compile(r"(?P<file>.+\.gguf)(?:-split-|\.)(?P<at>[a-z])", re.IGNORECASE),
    re.compile(r"(?P<file>.+\.gguf)\.(?P<at>part\d+|\d{3})", re.IGNORECASE),  # not x.gguf.1: that is wget's second copy
    re.compile(r"(?P<file>.+\.gguf)\.?(?P<at>a[a-z])", re.IGNORECASE),
)
_UNFINISHED = re.compile(
    r"(?P<file>.+\.(?:gguf|safetensors))\.(?:part|crdownload|incomplete|download|aria2|tmp|filepart|!qb)", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of `file`. `at` is its position; `of` is None if the name does not say how many there are."""

    path: Path
    file: str
    at: str
    of: int | None


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """An unusable file and its error. `names` are the requests that mean it, in lower case."""

    names: frozenset[str]
    error: FatalError


def piece_of(path: Path) -> Piece | None:
    for pattern in _PIECES:
        if found := pattern.fullmatch(path.name):
            named = found.groupdict()
            file = named.get("file") or f"{named['stem']}.gguf"
            of = named.get("of")
            return Piece(path=path, file=file, at=named["at"].lower(), of=int(of) if of and len(of) < 5 else None)
    return None


def why_piece(path: Path) -> ModelUnreadableError | None:
    """Return an error if the file's name shows that it is one of several pieces, else None."""
    piece = piece_of(path)
    if piece is None:
        return None
    beside = [each for each in _entries(path.parent, 0) if (found := piece_of(each)) and found.file == piece.file]
    return _of_pieces([found for each in beside or [path] if (found := piece_of(each))])


def why_empty_folder(path: Path) -> ModelUnreadableError | None:
    """Return an error if the folder is empty, else None."""
    hint = hint_of_empty(path)
    if hint is None:
        return None
    named = " with a file's name" if _names_a_file(path) else ""
    return ModelUnreadableError(f"model is an empty folder{named}: {printable(str(path))}", hint=hint)


def _names_a_file(path: Path) -> bool:
    return path.name.lower().endswith((".gguf", ".safetensors"))


def why_nothing(folder: Path, request: str | None = None) -> FatalError | None:
    """Return the error for the requested leftover, or for the first one without a request. None if nothing matches."""
    found = _leftovers(folder)
    wanted = (request or "").casefold()
    return next((each.error for each in found if not wanted or wanted in each.names), None)


def _leftovers(folder: Path) -> Iterator[Leftover]:
    paths = list(islice(_entries(folder, _DEPTH), ENTRIES_LIMIT))
    yield from _parts(paths)
    yield from _cut(paths)
    for path in paths:
        names = frozenset({path.name.casefold(), path.stem.casefold()})
        if unfinished := _UNFINISHED.fullmatch(path.name):
            message = f"download is not finished: {printable(str(path))}"
            error = ModelUnreadableError(message, hint="let it end, or fetch the file again from the start")
            whole = unfinished["file"].casefold()
            yield Leftover(names=names | {whole, whole.rpartition(".")[0]}, error=error)
        elif _names_a_file(path) and (empty := why_empty_folder(path)):
            yield Leftover(names=names, error=empty)
        elif lacking := why_no_weights(path):
            yield Leftover(names=names, error=lacking)
    projectors = [path for path in paths if is_projector(path.name)]
    if projectors and not any(path.name.lower().endswith(".gguf") for path in paths if path not in projectors):
        message = f"folder has only a multimodal projector and no model: {printable(str(projectors[0]))}"
        yield Leftover(names=frozenset(), error=ConfigError(message, hint="put its model beside it"))


def why_no_weights(path: Path) -> ModelUnreadableError | None:
    """Return an error if a folder has a config.json but none of its weight files, else None."""
    missing = missing_weights(path)
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    message = f"model has no weights: {printable(str(path))}: {printable(missing[0])}{more} missing"
    hint = "fetch the whole folder again; with git, `git lfs pull` brings them"
    return ModelUnreadableError(message, hint=hint)


def _parts(paths: Iterable[Path]) -> Iterator[Leftover]:
    """Yield split models with a missing part."""
    found: defaultdict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for path in paths:
        if part := PART.search(path.name):
            found[path.parent, path.name[: part.start()], int(part[2])].add(int(part[1]))
    for (folder, stem, count), there in sorted(found.items()):
        missing = [number for number in range(1, min(count, PARTS_LIMIT) + 1) if number not in there]
        if not missing:
            continue
        names = [f"{stem}-{number:05}-of-{count:05}.gguf" for number in missing]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = printable(str(folder / stem))
        message = f"model cannot be used: {where}: a part is missing: {printable(names[0])}{more}"
        error = ModelUnreadableError(message, hint="fetch what is missing, and put all parts into one folder")
        first = f"{stem}-00001-of-{count:05}"
        meant = (stem, f"{stem}.gguf", first, f"{first}.gguf")
        yield Leftover(names=frozenset(name.casefold() for name in meant), error=error)


def _cut(paths: Iterable[Path]) -> Iterator[Leftover]:
    found: defaultdict[tuple[Path, str], list[Piece]] = defaultdict(list)
    for path in paths:
        if piece := piece_of(path):
            found[path.parent, piece.file].append(piece)
    for (_, file), pieces in sorted(found.items()):
        own = {each.path.name.casefold() for each in pieces}
        yield Leftover(names=frozenset({file.casefold(), Path(file).stem.casefold(), *own}), error=_of_pieces(pieces))


def _of_pieces(pieces: Sequence[Piece]) -> ModelUnreadableError:
    ordered = sorted(pieces, key=lambda each: (len(each.at), each.at))
    folder, file, of = ordered[0].path.parent, ordered[0].file, ordered[0].of
    message = f"model is cut into pieces by bytes: {printable(str(folder / file))}: found {len(ordered)}"
    if of is not None and len(ordered) < of:
        hint = "fetch the others as well, then join all of them in their order with `cat`"
        return ModelUnreadableError(f"{message} of {of}", hint=hint)
    names = " ".join(printable(each.path.name) for each in ordered)
    return ModelUnreadableError(message, hint=f"join them in their order: `cat {names} > {printable(file)}`")


def _entries(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, ENTRIES_LIMIT))
    except OSError:  # the listing of models reports it
        return
    for name in names:
        if name.startswith((".", "models--")) or name == "lost+found":
            continue
        yield folder / name
        if depth and os.path.isdir(folder / name):  # noqa: PTH112 - pathlib's raises for what may not be looked at
            yield from _entries(folder / name, depth - 1)
