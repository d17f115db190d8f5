"""Read the headers of untrusted safetensors files: facts or ModelUnreadableError, in bounded memory and time.

Format: https://github.com/huggingface/safetensors, `Metadata::validate` of safetensors/src/tensor.rs: eight bytes of
length, JSON of that length, then data that the tensors cover without gap or overlap. Everything refused here is also
refused there, except for the limits below, which no real file reaches.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeGuard

from appliance.errors import ModelUnreadableError
from appliance.model.formats.entries import why_no_target
from appliance.values import dataclass

HEADER_LIMIT_BYTES = 16 * 1024 * 1024  # 73,000 tensors of one GPTQ file need 10 MiB
JSON_LIMIT_BYTES = 32 * 1024 * 1024  # the index of 140,000 tensors needs 14 MiB
NAME_LIMIT = 255  # bytes, Linux's limit of a file name
SHARDS_LIMIT = 1024
# Brackets and commas. Each can become a Python object, so their number limits the memory, not the text's length.
_MARKS_LIMIT = 4_000_000
_NAME_LIMIT = 512
_PIECE = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
INDEX = "model.safetensors.index.json"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_DAMAGED_HINT = "the file is damaged or was not downloaded whole: fetch it again and compare its size and checksum"
_END_BYTES = 4096  # line breaks may follow the last bracket
_MIXED_HINT = "fetch the whole folder again, from one place, into an empty one"


@dataclass(frozen=True, kw_only=True)
class Stored:
    name: str
    dtype: str
    shape: tuple[int, ...]  # outermost dimension first
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    path: Path
    tensors: tuple[Stored, ...]
    header_bytes: int
    file_bytes: int


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """Read all files of one model, in order of their names. Raises ModelUnreadableError naming the file at fault."""
    index = _index(folder)
    names = sorted(set(index.values())) if index else _unindexed(folder)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _unusable(folder, f"a part is missing: {_short(missing[0])}{more}", hint="put all parts into one folder")
    shards = tuple(read_shard(folder / name) for name in names)
    seen: dict[str, str] = {}
    for shard in shards:
        for tensor in shard.tensors:
            if tensor.name in seen:
                reason = f"{seen[tensor.name]} and {shard.path.name} both have {tensor.name}"
                _unusable(folder, reason, hint=_MIXED_HINT)
            seen[tensor.name] = shard.path.name
    if index:
        _compare(folder, index, seen)
    return shards


def missing_weights(folder: Path) -> tuple[str, ...]:
    """Return the files in a folder's index if none of them exists; empty for any other folder."""
    try:
        if not (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
            return ()
        return tuple(sorted(set(_index(folder).values())))
    except (ModelUnreadableError, OSError):
        return ()


def read_shard(path: Path) -> Shard:
    data, file_bytes = _read_header(path)
    entries = parse_json(data, path, "its header")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        _damaged(path, "its __metadata__ is not an object")
    begin = 8 + len(data)
    tensors = _tensors(path, entries, file_bytes - begin)
    return Shard(path=path, tensors=tensors, header_bytes=begin, file_bytes=file_bytes)


def read_json(path: Path) -> dict[str, object]:
    """Read an object from a file of limited size. Raises ModelUnreadableError, also if the file is missing."""
    with _Opened(path) as file:
        if file.size > JSON_LIMIT_BYTES:
            _unusable(path, f"it is {file.size} bytes long; such a file usually has a few thousand", hint=_MIXED_HINT)
        return parse_json(file.read(file.size), path, "it")


def check_json(path: Path) -> None:
    """Check that the file, if it exists, is a JSON object. Raises ModelUnreadableError.

    Repeated names are allowed, as in every program that reads such files.
    """
    if os.path.lexists(path):
        with _Opened(path) as file:
            if file.size <= JSON_LIMIT_BYTES:
                parse_json(file.read(file.size), path, "it", repeats=True)


def check_end(path: Path) -> None:
    """Check that a large JSON file, if it exists, was not cut off. Raises ModelUnreadableError."""
    if os.path.lexists(path):
        with _Opened(path) as file:
            if not file.read_end(_END_BYTES).rstrip().endswith(b"}"):
                _damaged(path, "it was cut off: its last character is not }")


def parse_json(data: bytes, path: Path, what: str, *, repeats: bool = False) -> dict[str, object]:
    if sum(map(data.count, (b"[", b"{", b","))) > _MARKS_LIMIT:
        _damaged(path, f"{what} has more than {_MARKS_LIMIT} entries")
    try:
        value = json.loads(data, object_pairs_hook=dict if repeats else _without_repeats)
    except RecursionError:
        _damaged(path, f"{what} is nested too deeply to be read")
    except ValueError as error:  # also for invalid UTF-8, and for a number of thousands of digits
        _damaged(path, f"{what} is not JSON: {_short(str(error))}")
    if not isinstance(value, dict):
        _damaged(path, f"{what} is not a JSON object")
    return value


def _without_repeats(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        message = "a name is twice in one object"
        raise ValueError(message)
    return found


def _short(text: str) -> str:
    """Shorten a text from the file to one line, without control characters for the terminal."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text[:160])
    return shown + ("…" if len(text) > len(shown) else "")


def _read_header(path: Path) -> tuple[bytes, int]:
    with _Opened(path) as file:
        if file.size < 8:
            _damaged(path, f"it is {file.size} bytes long, but its header's length alone takes 8")
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start[:4] == b"GGUF":
            _unusable(path, "it is a GGUF file", hint="call it .gguf")
        if start.startswith(b"version "):
            _unusable(path, "it is a Git LFS pointer: the file itself was never fetched", hint="fetch it with git lfs")
        if length > min(HEADER_LIMIT_BYTES, file.size - 8):
            most = min(HEADER_LIMIT_BYTES, file.size - 8)
            _damaged(path, f"its header should be at most {most} bytes long, but its length says {length}")
        return file.read(length), file.size


def _tensors(path: Path, entries: Mapping[str, object], data_bytes: int) -> tuple[Stored, ...]:
    found = sorted((_tensor(path, name, entry) for name, entry in entries.items()), key=lambda item: item[:2])
    end = 0
    for begin, tensor_end, tensor in found:
        if begin != end:
            _damaged(path, f"tensor {tensor.name} should begin at {end} of its data, but begins at {begin}")
        end = tensor_end
    if end != data_bytes:
        _damaged(path, f"its tensors end at {end} of its data, which has {data_bytes} bytes")
    return tuple(tensor for _, _, tensor in found)


def _tensor(path: Path, name: str, entry: object) -> tuple[int, int, Stored]:
    shown = _short(name)
    if not isinstance(entry, dict) or len(name) > _NAME_LIMIT or not name.isprintable():
        _damaged(path, f"its entry {shown} is not a tensor")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        _unusable(path, f"tensor {shown} has an unknown type: {_short(str(dtype))}", hint=_DAMAGED_HINT)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        _damaged(path, f"tensor {shown} has no shape or no place: {_short(str(entry))}")
    elements = 1
    for dimension in shape:
        elements *= dimension
    size_bytes, rest = divmod(elements * _BITS[dtype], 8)
    if rest or size_bytes != offsets[1] - offsets[0]:
        _damaged(path, f"tensor {shown} of {elements} × {dtype} cannot lie from {offsets[0]} to {offsets[1]}")
    tensor = Stored(name=name, dtype=dtype, shape=tuple(shape), size_bytes=size_bytes)
    return offsets[0], offsets[1], tensor


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """True for a list of at most eight sizes, each small enough that a product of them stays bounded."""
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.exists():
        return {}
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        _unusable(path, "it has no weight_map", hint=_MIXED_HINT)
    files = set()
    for name, file in places.items():
        if not isinstance(file, str) or not _is_name(file):
            _unusable(path, f"it places {_short(name)} in {_short(str(file))}", hint=_MIXED_HINT)
        files.add(file)
    if len(files) > SHARDS_LIMIT:
        _unusable(path, f"it names {len(files)} files, but a model has at most {SHARDS_LIMIT}", hint=_MIXED_HINT)
    return places


def _is_name(file: str) -> bool:
    """True for a plain file name of allowed length; rejects path traversal."""
    is_name = file.endswith(".safetensors") and "/" not in file and "\0" not in file
    return is_name and len(file.encode("utf-8", "replace")) <= NAME_LIMIT


def _unindexed(folder: Path) -> list[str]:
    """Return the only file, or the only complete set of numbered files."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        _unusable(folder, "it has no *.safetensors file", hint="give the folder that has the weights")
    if len(names) == 1 and not _PIECE.search(names[0]):
        return names
    counts = {match[2] for name in names if (match := _PIECE.search(name))}
    stems = {_PIECE.sub("", name) for name in names if _PIECE.search(name)}
    if len(counts) != 1 or len(stems) != 1 or not 1 <= int(min(counts)) <= SHARDS_LIMIT:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        _unusable(folder, f"without {INDEX} it is unknown which files belong together: {shown}", hint=_MIXED_HINT)
    count, stem = int(counts.pop()), stems.pop()
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _compare(folder: Path, index: Mapping[str, str], seen: Mapping[str, str]) -> None:
    absent = next((name for name in index if seen.get(name) != index[name]), None)
    if absent is not None:
        _unusable(folder, f"{index[absent]} should have {_short(absent)}, but does not", hint=_MIXED_HINT)
    if len(seen) > len(index):
        extra = next(name for name in seen if name not in index)
        _unusable(folder, f"{seen[extra]} has {extra}, which {INDEX} does not list", hint=_MIXED_HINT)


class _Opened:
    """A regular file, opened without blocking on a named pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Opened:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if astray := why_no_target(self._path):
                raise astray from error
            reason = (error.strerror or str(error)).lower()
            message = f"model cannot be opened: {self._path}: {reason}"
            raise ModelUnreadableError(message, hint="give a folder with config.json and all its weights") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            _unusable(self._path, "it is not a regular file", hint=_MIXED_HINT)
        self.size = status.st_size
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, size: int) -> bytes:
        pieces, missing = [], size
        while missing:
            try:
                piece = os.read(self._descriptor, missing)
            except OSError as error:
                _unusable(self._path, f"it cannot be read: {(error.strerror or str(error)).lower()}", hint=_MIXED_HINT)
            if not piece:
                _damaged(self._path, "it became shorter while it was read")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def read_end(self, most: int) -> bytes:
        os.lseek(self._descriptor, max(0, self.size - most), os.SEEK_SET)
        return self.read(min(most, self.size))


def _damaged(path: Path, reason: str) -> NoReturn:
    message = f"model is unreadable: {path}: {reason}"
    raise ModelUnreadableError(message, hint=_DAMAGED_HINT)


def _unusable(path: Path, reason: str, *, hint: str) -> NoReturn:
    message = f"model cannot be used: {path}: {reason}"
    raise ModelUnreadableError(message, hint=hint)
