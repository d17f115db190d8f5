"""Read the header of an untrusted GGUF file: facts or ModelUnreadableError, in bounded memory and time.

Format: llama.cpp's ggml/include/gguf.h. Everything refused here is also refused by its ggml/src/gguf.cpp, except for
the limits below, which no real file reaches. Plain reads, not mmap: truncating a mapped file during the read causes
a SIGBUS.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from appliance.errors import ModelUnreadableError
from appliance.model.formats.entries import why_no_target
from appliance.model.formats.ggml_types import GGML_TYPES, REMOVED_TYPES, GgmlType
from appliance.values import dataclass

# The largest known vocabularies (262k tokens, 514k merges) need 15 MiB.
HEADER_LIMIT_BYTES = 64 * 1024 * 1024
KEYS_LIMIT = 8192
KEY_LIMIT_BYTES = 1024
TENSORS_LIMIT = 65536
TEXT_KEPT_BYTES = 512  # of a longer text only the length is kept
TEMPLATE = "tokenizer.chat_template"
TEMPLATE_KEPT_BYTES = 256 * 1024  # the template shows the model's abilities; the longest known one has 30 KiB
ARRAY_KEPT = 1024  # llama.cpp allows 512 layers, and only arrays over layers are used
ARRAYS_KEPT = 65536  # total number of entries in kept arrays
CONVERT_ANEW = "convert the original model again with a current GGUF converter"
_NAME_LIMIT_BYTES = 63  # GGML_MAX_NAME - 1
_DIMENSIONS_LIMIT = 4  # GGML_MAX_DIMS
_INT64_MAX = (1 << 63) - 1
_FIRST_READ_BYTES = 1024 * 1024
_MAGIC = b"GGUF"
_TEXT_BYTES = 8  # shorter printable data may be numbers

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# gguf_type in gguf.h: number -> struct code of one value.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DAMAGED_HINT = "the file is damaged or was not downloaded whole: fetch it again and compare its size and checksum"
_GIVE_ONE = "this image serves GGUF files: give it one"
_FETCH_ANEW = "fetch the file again, from its download address (…/resolve/main/…), with a token if it is gated"
# First bytes of other file types, what they are, and what to do.
_FOREIGN = (
    (b"\x89PNG", "a PNG image", _GIVE_ONE),
    (b"PK\x03\x04", "a ZIP archive or a PyTorch checkpoint", f"{_GIVE_ONE}, or unpack the archive"),
    (b"\x1f\x8b", "a gzip archive", f"{_GIVE_ONE}, or unpack the archive: gunzip"),
    (
        b"version https://git-lfs",
        "a Git LFS pointer: the file itself was never fetched",
        "`git lfs pull` in its folder fetches the file; or fetch it without git",
    ),
    (b"<", "a web page or XML, as a failed download leaves it", _FETCH_ANEW),
    (b'{"', "JSON, as an answer of a server that was kept", _FETCH_ANEW),
    (b"lmgg", "a GGML file from before GGUF", "get the model as GGUF: files of that age can no longer be read"),
    (b"tjgg", "a GGML file from before GGUF", "get the model as GGUF: files of that age can no longer be read"),
)


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A value that was not kept. `count` is an array's number of entries, or a text's length in bytes."""

    count: int


Value = int | float | bool | str | tuple[int | float | bool, ...] | Skipped


@dataclass(frozen=True, kw_only=True)
class Tensor:
    name: str
    type_name: str
    shape: tuple[int, ...]  # innermost dimension first
    offset: int  # in the file
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Gguf:
    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    header_bytes: int  # offset of the first tensor's data; without tensors, the end of the header
    file_bytes: int
    parts: tuple[Path, ...] = ()  # all files of a split model, in order; empty if there is only this file
    is_joined: bool = False  # True if another GGUF file begins after the last tensor


def read_gguf(path: Path) -> Gguf:
    """Read a header. Raises ModelUnreadableError with path, byte offset and what was expected. Uses less than 200 MB
    of memory."""
    descriptor = _open(path)
    try:
        return _read(_Reader(path, descriptor))
    finally:
        os.close(descriptor)


def read_texts(path: Path, key: str) -> tuple[bytes, ...]:
    """Read the texts of array `key`, which `read_gguf` skips; empty if there is no such array. Raises
    ModelUnreadableError."""
    descriptor = _open(path)
    try:
        reader = _Reader(path, descriptor)
        _read_version(reader)
        reader.skip(8, "a tensor count")
        for position in range(reader.count("a key count", each_bytes=14, limit=KEYS_LIMIT)):
            name = reader.name(f"key {position}", KEY_LIMIT_BYTES)
            if name == key:
                return _read_texts(reader, key)
            _read_value(reader, name, 0)
        return ()
    finally:
        os.close(descriptor)


def _read_texts(reader: _Reader, key: str) -> tuple[bytes, ...]:
    if (reader.u32(f"the type of {key}"), reader.u32(f"the type of the entries of {key}")) != (_ARRAY, _STRING):
        return ()
    count = reader.count(f"a number of entries of {key}", each_bytes=8, limit=HEADER_LIMIT_BYTES)
    what = f"an entry of {key}"
    return tuple(reader.take(reader.text_length(what), what) for _ in range(count))


def _open(path: Path) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe called model.gguf would block the start for ever.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        if astray := why_no_target(path):
            raise astray from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "give the path of a GGUF file on the volume"
        if isinstance(error, PermissionError):
            hint = f"make it readable for user {os.getuid()} or group {os.getgid()} of the container"
        message = f"model cannot be opened: {path}: {reason.lower()}"
        raise ModelUnreadableError(message, hint=hint) from error


class _Reader:
    """Cursor over the beginning of a file. Every length is checked against the file's size before it is used."""

    def __init__(self, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.path = path
        self.offset = 0
        self.file_bytes = status.st_size
        self._descriptor = descriptor
        self._bytes = bytearray()
        if stat.S_ISDIR(status.st_mode):
            self.fail("a GGUF file", "a directory", hint="name the .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            self.fail("a GGUF file", "a device, pipe or socket", hint="give the path of a GGUF file")
        if not status.st_size:
            self.fail("a GGUF file", "an empty file of 0 bytes")

    def fail(self, expected: str, found: str, *, at: int | None = None, hint: str = _DAMAGED_HINT) -> NoReturn:
        offset = self.offset if at is None else at
        message = f"model is unreadable: {self.path}: at byte {offset}: expected {expected}, found {found}"
        raise ModelUnreadableError(message, hint=hint)

    def u32(self, what: str) -> int:
        return self._number(_U32, what)

    def u64(self, what: str) -> int:
        return self._number(_U64, what)

    def count(self, what: str, *, each_bytes: int, limit: int) -> int:
        """Read a number of following items, each at least `each_bytes` long."""
        at = self.offset
        count = self.u64(what)
        possible = (self.file_bytes - self.offset) // each_bytes
        if count > min(possible, limit):
            self.fail(f"{what} of at most {min(possible, limit)}", str(count), at=at)
        return count

    def take(self, size: int, what: str) -> bytes:
        self._fill(self.offset + size, what)
        begin = self.offset
        self.offset += size
        return bytes(self._bytes[begin : self.offset])

    def skip(self, size: int, what: str) -> None:
        self._fill(self.offset + size, what)
        self.offset += size

    def text_length(self, what: str) -> int:
        at = self.offset
        length = self.u64(f"the length of {what}")
        if length > self.file_bytes - self.offset:
            self.fail(f"{what} of at most {self.file_bytes - self.offset} bytes", f"a length of {length}", at=at)
        return length

    def name(self, what: str, limit: int) -> str:
        at = self.offset
        length = self.text_length(what)
        if length > limit:
            self.fail(f"{what} of at most {limit} bytes", f"a length of {length}", at=at)
        return _printable(self.take(length, what))

    def skip_texts(self, count: int, what: str) -> None:
        """Skip texts. This is the hot loop of every start, up to 800,000 entries, so it calls nothing but the
        unpacking."""
        data, length_at, at, done = self._bytes, _U64.unpack_from, self.offset, 0
        while done < count:
            try:
                for done in range(done, count):  # noqa: B007, B020 - continues after more of the file was read
                    at += 8 + length_at(data, at)[0]
                done = count
            except (struct.error, OverflowError):
                self._fill(at + 8, f"entry {done} of the {count} texts of {what} at byte {at}")
        self._fill(at, f"the last of the {count} texts of {what} to end by byte {at}")
        self.offset = at

    def begins_at(self, offset: int) -> bool:
        """True if the magic letters of a GGUF file are at this offset."""
        try:
            return os.pread(self._descriptor, len(_MAGIC), offset) == _MAGIC
        except OSError:
            return False

    def _number(self, shape: struct.Struct, what: str) -> int:
        self._fill(self.offset + shape.size, what)
        value: int = shape.unpack_from(self._bytes, self.offset)[0]
        self.offset += shape.size
        return value

    def _fill(self, end: int, what: str) -> None:
        """Read the file's first `end` bytes into memory."""
        if end <= len(self._bytes):
            return
        if end > self.file_bytes:
            self.fail(what, f"the end of the file at byte {self.file_bytes}")
        if end > HEADER_LIMIT_BYTES:
            self.fail(f"a header below {HEADER_LIMIT_BYTES} bytes", f"one that needs {end}")
        target = min(max(end, 2 * len(self._bytes), _FIRST_READ_BYTES), self.file_bytes, HEADER_LIMIT_BYTES)
        while len(self._bytes) < target:
            self._bytes += self._next_chunk(target - len(self._bytes))

    def _next_chunk(self, size: int) -> bytes:
        try:
            chunk = os.pread(self._descriptor, size, len(self._bytes))
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "an error")
            self.fail("readable bytes", f"{name}: {error.strerror}", at=len(self._bytes), hint="check the disk")
        if not chunk:
            self.fail("more of the file", "its end: it became shorter while it was read", at=len(self._bytes))
        return chunk


def _read(reader: _Reader) -> Gguf:
    version = _read_version(reader)
    tensor_count = reader.count("a tensor count", each_bytes=24, limit=TENSORS_LIMIT)
    key_count = reader.count("a key count", each_bytes=14, limit=KEYS_LIMIT)
    metadata = _read_metadata(reader, key_count)
    alignment = _alignment(reader, metadata)
    entries = _read_tensor_entries(reader, tensor_count)
    header_end = reader.offset
    data_offset = -(-header_end // alignment) * alignment if entries else header_end
    tensors = _placed(reader, entries, data_offset, alignment)
    end = tensors[-1].offset + tensors[-1].size_bytes if tensors else header_end
    return Gguf(
        path=reader.path,
        version=version,
        metadata=metadata,
        tensors=tensors,
        header_bytes=data_offset,
        file_bytes=reader.file_bytes,
        is_joined=any(reader.begins_at(at) for at in {end, -(-end // alignment) * alignment}),
    )


def _read_version(reader: _Reader) -> int:
    start = reader.take(min(32, reader.file_bytes), "the beginning of the file")
    if not start.startswith(_MAGIC):
        words, hint = next(
            ((words, hint) for magic, words, hint in _FOREIGN if start.startswith(magic)), (f"{start[:4]!r}", _GIVE_ONE)
        )
        if start[8:9] == b"{":
            words, hint = "a safetensors file", _GIVE_ONE
        elif (
            hint is _GIVE_ONE
            and len(start) >= _TEXT_BYTES
            and (text := start[:20]).isascii()
            and text.decode().isprintable()
        ):
            words, hint = f"text, as an answer of a server that was kept: {text.decode()!r}", _FETCH_ANEW
        reader.fail("the letters GGUF", words, at=0, hint=hint)
    reader.offset = 4
    version = reader.u32("a version")
    if version & 0xFFFF == 0 and version:
        reader.fail("little-endian numbers", "a big-endian GGUF file", at=4, hint="convert the model for this CPU")
    if version not in (2, 3):
        hint = CONVERT_ANEW if version < 2 else "this image is too old for the file: use a newer image"
        reader.fail("GGUF version 2 or 3", f"version {version}", at=4, hint=hint)
    return version


def _read_metadata(reader: _Reader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    budget = ARRAYS_KEPT
    for position in range(count):
        at = reader.offset
        key = reader.name(f"key {position} of {count}", KEY_LIMIT_BYTES)
        if not key or key in metadata:
            reader.fail(f"a name for key {position} that is new", f"{key!r}", at=at)
        value = _read_value(reader, key, budget)
        if isinstance(value, tuple):
            budget -= len(value)
        metadata[key] = value
    return metadata


def _read_value(reader: _Reader, key: str, budget: int) -> Value:
    at = reader.offset
    kind = reader.u32(f"the type of {key}")
    if kind == _STRING:
        return _read_text(reader, key)
    if kind == _ARRAY:
        return _read_array(reader, key, budget)
    if kind not in _SCALARS:
        reader.fail(f"a type from 0 to 12 for {key}", str(kind), at=at)
    return _read_scalars(reader, key, kind, 1)[0]


def _read_text(reader: _Reader, key: str) -> str | Skipped:
    length = reader.text_length(f"the text of {key}")
    if length > (TEMPLATE_KEPT_BYTES if key.startswith(TEMPLATE) else TEXT_KEPT_BYTES):
        reader.skip(length, f"the text of {key}")
        return Skipped(count=length)
    return _printable(reader.take(length, f"the text of {key}"))


def _read_array(reader: _Reader, key: str, budget: int) -> Value:
    at = reader.offset
    kind = reader.u32(f"the type of the entries of {key}")
    if kind != _STRING and kind not in _SCALARS:
        found = "an array of arrays" if kind == _ARRAY else str(kind)
        reader.fail(f"entries of {key} of a type from 0 to 12", found, at=at)
    size = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
    count = reader.count(f"a number of entries of {key}", each_bytes=size, limit=HEADER_LIMIT_BYTES)
    if kind == _STRING:
        reader.skip_texts(count, key)
    elif count <= min(ARRAY_KEPT, budget):
        return _read_scalars(reader, key, kind, count)
    else:
        reader.skip(count * size, f"the {count} entries of {key}")
    return Skipped(count=count)


def _read_scalars(reader: _Reader, key: str, kind: int, count: int) -> tuple[int | float | bool, ...]:
    shape = struct.Struct(f"<{count}{_SCALARS[kind]}")
    return shape.unpack(reader.take(shape.size, f"the value of {key}"))


def _printable(data: bytes) -> str:
    """Decode a text and replace control characters: names reach logs and terminals."""
    text = data.decode("utf-8", "replace")
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _alignment(reader: _Reader, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        reader.fail("a power of two for general.alignment", str(alignment))
    return alignment


@dataclass(frozen=True, kw_only=True)
class _Entry:
    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int  # relative to the begin of the data
    size_bytes: int
    at: int  # offset of the entry itself


def _read_tensor_entries(reader: _Reader, count: int) -> list[_Entry]:
    entries: list[_Entry] = []
    names: set[str] = set()
    for position in range(count):
        at = reader.offset
        name = reader.name(f"the name of tensor {position} of {count}", _NAME_LIMIT_BYTES)
        if name in names:
            reader.fail(f"a name for tensor {position} that is new", f"{name!r}", at=at)
        names.add(name)
        entries.append(_read_tensor_entry(reader, name, at))
    return entries


def _read_tensor_entry(reader: _Reader, name: str, at: int) -> _Entry:
    dimensions = reader.u32(f"the number of dimensions of {name}")
    if dimensions > _DIMENSIONS_LIMIT:
        reader.fail(f"at most {_DIMENSIONS_LIMIT} dimensions of {name}", str(dimensions), at=reader.offset - 4)
    shape = tuple(reader.u64(f"a dimension of {name}") for _ in range(dimensions))
    kind = _read_type(reader, name)
    elements = 1
    for size in shape:
        elements *= size
    if max(elements, *shape, 0) > _INT64_MAX:
        reader.fail(f"a shape of {name} that can exist", str(shape), at=at)
    row = shape[0] if shape else 1
    if row % kind.block_size:
        reader.fail(f"rows of {name} in blocks of {kind.block_size} ({kind.name})", f"{row} values a row", at=at)
    return _Entry(
        name=name,
        type=kind,
        shape=shape,
        offset=reader.u64(f"the offset of {name}"),
        size_bytes=elements // kind.block_size * kind.block_bytes,
        at=at,
    )


def _read_type(reader: _Reader, name: str) -> GgmlType:
    at = reader.offset
    number = reader.u32(f"the type of {name}")
    kind = GGML_TYPES.get(number)
    if kind is None:
        removed = REMOVED_TYPES.get(number)
        found = f"{removed}, which GGUF no longer has" if removed else f"type {number}"
        reader.fail(f"a ggml type for {name}", found, at=at, hint=CONVERT_ANEW)
    return kind


def _placed(reader: _Reader, entries: list[_Entry], data_offset: int, alignment: int) -> tuple[Tensor, ...]:
    """Compute the offsets. Each tensor must directly follow the previous one, as llama.cpp requires; so none
    overlap."""
    tensors, end = [], 0
    for entry in entries:
        if entry.offset != end:
            reader.fail(f"tensor {entry.name} at offset {end} of the data", f"offset {entry.offset}", at=entry.at)
        begin = data_offset + end
        if begin + entry.size_bytes > reader.file_bytes:
            expected = f"{entry.size_bytes} bytes of tensor {entry.name}"
            reader.fail(expected, f"the end of the file at byte {reader.file_bytes}", at=begin)
        tensors.append(
            Tensor(
                name=entry.name,
                type_name=entry.type.name,
                shape=entry.shape,
                offset=begin,
                size_bytes=entry.size_bytes,
            )
        )
        end += -(-entry.size_bytes // alignment) * alignment
    return tuple(tensors)
