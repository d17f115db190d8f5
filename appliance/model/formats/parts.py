"""A model that is split into several files: `name-00001-of-0000N.gguf`, as llama-gguf-split writes them.

The first part has the metadata, every part the header of its own tensors. The engine gets the first part and finds
the others by name, so they must be in the same folder.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.formats.gguf import Gguf, read_gguf

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
PARTS_LIMIT = 1024  # the largest known splits have some dozens


def read_whole(path: Path) -> Gguf:
    """Read a file, or all parts after a first one, as one model: tensors of all parts, metadata of the first.

    Raises ModelUnreadableError naming the part that is missing, damaged, or from another model.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= PARTS_LIMIT:
        _fail(path, f"its key split.count must be a whole number up to {PARTS_LIMIT}: {count}")
    if count <= 1:
        return first
    if first.is_joined:
        hint = (
            "keep the parts as they were fetched, in one folder, and give the first; or merge them with "
            "`llama-gguf-split --merge FIRST-PART OUT.gguf`"
        )
        _fail(path, f"its {count} parts were put into one file by bytes, as with cat", hint=hint)
    paths = part_paths(path, count)
    parts = [first, *(read_gguf(part) for part in paths[1:])]
    for number, part in enumerate(parts):
        _check(part, number, count)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        _fail(path, f"its parts have {len(tensors) - len(names)} tensors more than once")
    announced = first.metadata.get("split.tensors.count", len(tensors))
    if announced != len(tensors):
        _fail(path, f"its parts have {len(tensors)} tensors, but the first announces {announced}")
    return replace(first, tensors=tensors, file_bytes=sum(part.file_bytes for part in parts), parts=tuple(paths))


def part_paths(path: Path, count: int) -> list[Path]:
    """Return the paths of all parts. Raises ModelUnreadableError if `path` is not named as the first part, or a part
    is missing."""
    named = PART.search(path.name)
    if named and int(named[2]) == count and int(named[1]) != 1:
        first = path.with_name(f"{path.name[: named.start()]}-00001-of-{count:05}.gguf")
        there = f"give {first.name}" if first.exists() else "it is missing: fetch it, and put all parts into one folder"
        _fail(path, f"it is part {int(named[1])} of {count}, and the first is {first.name}", hint=there)
    if not named or int(named[2]) != count:
        hint = f"name the parts as they were, the first …-00001-of-{count:05}.gguf, and put all into one folder"
        _fail(path, f"it is one of {count} parts, but its name does not say that it is the first", hint=hint)
    stem = path.name[: named.start()]
    paths = [path, *(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1))]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _fail(path, f"a part is missing: {missing[0]}{more}", hint="put all parts into one folder")
    return paths


def plain_name(path: Path) -> str:
    """Name of the model in the API: the file's name without `.gguf` and part number."""
    if PART.search(path.name):
        return PART.sub("", path.name)
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.rpartition("--")[2]  # the snapshot's own name is a commit
    return path.stem if path.suffix.lower() == ".gguf" else path.name  # a folder's name may have dots: Qwen2.5-7B


def _check(part: Gguf, number: int, count: int) -> None:
    seen = (part.metadata.get("split.no"), part.metadata.get("split.count"))
    if seen != (number, count):
        _fail(part.path, f"it should be part {number + 1} of {count}: split.no is {seen[0]}, split.count is {seen[1]}")


def _fail(path: Path, reason: str, *, hint: str = "fetch all parts again, from one place") -> NoReturn:
    message = f"model cannot be used: {path}: {reason}"
    raise ModelUnreadableError(message, hint=hint)
