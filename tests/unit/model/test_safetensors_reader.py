"""The safetensors reader with invalid files and incomplete folders."""

from __future__ import annotations

import json
import os
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import ModelUnreadableError
from appliance.model import read_model
from appliance.model.formats.safetensors import (
    HEADER_LIMIT_BYTES,
    INDEX,
    JSON_LIMIT_BYTES,
    Shard,
    read_json,
    read_shard,
    read_shards,
)
from tests.builders import examples
from tests.unit.model.safetensors_files import DENSE, header, raw, read_or_words, write_file, write_folder, write_shards

SAME_FOLDER = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refusal(path: Path, read: Any = read_shards) -> str:
    with pytest.raises(ModelUnreadableError) as caught:
        read(path)
    assert caught.value.exit_code == 30
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value.message


def refusal_of(folder: Path, data: bytes) -> str:
    path = folder / "m.safetensors"
    path.write_bytes(data)
    return refusal(path, read_shard)


def test_a_whole_file(tmp_path: Path) -> None:
    shard = read_shard(write_file(tmp_path / "m.safetensors", DENSE, {"format": "pt"}))
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in shard.tensors] == [
        (name, dtype, tuple(shape)) for name, (dtype, shape) in DENSE.items()
    ]
    assert sum(tensor.size_bytes for tensor in shard.tensors) == shard.file_bytes - shard.header_bytes
    assert shard.tensors[0].size_bytes == 2 * 100 * 64


def test_a_tensor_of_nothing_and_one_of_half_bytes(tmp_path: Path) -> None:
    entries = {
        "empty": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]},
        "four": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
    }
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(json.dumps(entries).encode(), 7))
    assert {tensor.name: tensor.size_bytes for tensor in read_shard(path).tensors} == {
        "empty": 0,
        "four": 3,
        "scalar": 4,
    }


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"data_offsets": [0, 9]}, "2 × F32 cannot lie from 0 to 9"),
        ({"data_offsets": [8, 0]}, "cannot lie from 8 to 0"),
        ({"data_offsets": [4, 12]}, "should begin at 0 of its data, but begins at 4"),
        ({"data_offsets": [-8, 0]}, "has no shape or no place"),
        ({"data_offsets": [0]}, "has no shape or no place"),
        ({"data_offsets": [0, 8.0]}, "has no shape or no place"),
        ({"data_offsets": [0, 1 << 64]}, "has no shape or no place"),
        ({"shape": [True, 2]}, "has no shape or no place"),
        ({"shape": [2] * 9}, "has no shape or no place"),
        ({"shape": [(1 << 63) - 1] * 8}, "cannot lie"),
        ({"shape": "2"}, "has no shape or no place"),
        ({"dtype": "F33"}, "has an unknown type: F33"),
        ({"dtype": ["F32"]}, "has an unknown type"),
        ({"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}, "cannot lie"),
    ],
)
def test_a_tensor_that_lies(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    assert words in refusal_of(tmp_path, raw(json.dumps({"t": ENTRY | entry}).encode(), 8))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "its header's length alone takes 8"),
        (b"1234567", "its header's length alone takes 8"),
        (struct.pack("<Q", 1 << 63) + b"{}", "at most 2 bytes long, but its length says 9223372036854775808"),
        (struct.pack("<Q", 3) + b"{}", "at most 2 bytes long, but its length says 3"),
        (raw(b"[]", 0), "its header is not a JSON object"),
        (raw(b"nonsense", 0), "its header is not JSON"),
        (raw(b'"\xff"', 0), "its header is not JSON"),
        (raw(b"1" * 5000, 0), "its header is not JSON"),
        (raw(b'{"a": 1}', 0), "its entry a is not a tensor"),
        (raw(b'{"__metadata__": []}', 0), "its __metadata__ is not an object"),
        (raw(b'{"\\u001b[2J": {}}', 0), "\ufffd[2J is not a tensor"),
        (raw(b"{}", 5), "its tensors end at 0 of its data, which has 5 bytes"),
        (raw(json.dumps({"t": ENTRY}).encode(), 9), "which has 9 bytes"),
        (raw(json.dumps({"t": ENTRY}).encode(), 7), "which has 7 bytes"),
        (raw(json.dumps({"t": ENTRY, "u": ENTRY}).encode(), 8), "should begin at 8 of its data, but begins at 0"),
        (raw(b'{"t": {}, "t": {}}', 0), "a name is twice in one object"),
        (raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0), "is nested too deeply"),
        (raw(b"[" * 100_000, 0), "is nested too deeply"),
        (b"GGUF\x03\0\0\0" + bytes(20), "it is a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal_of(tmp_path, data)


def test_a_huge_header_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", HEADER_LIMIT_BYTES + 1))
    os.truncate(path, 4 << 30)  # a hole
    assert f"at most {HEADER_LIMIT_BYTES} bytes" in refusal(path, read_shard)
    path.write_bytes(raw(b"{" + b"[]," * (HEADER_LIMIT_BYTES // 3 - 10), 0))
    tracemalloc.start()
    assert "has more than 4000000 entries" in refusal(path, read_shard)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * HEADER_LIMIT_BYTES


@given(st.binary(max_size=200), st.integers(0, 200))
@SAME_FOLDER
def test_any_bytes_are_refused_in_words(tmp_path: Path, data: bytes, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + data)
    shard = read_or_words(path, read_shard)
    if isinstance(shard, Shard):
        assert shard.header_bytes <= shard.file_bytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from(["F32", "F4", "X"]) | JSON, "shape": JSON, "data_offsets": JSON}
)


@given(st.dictionaries(st.text(max_size=5), ENTRIES | JSON, max_size=4))
@SAME_FOLDER
def test_any_header_is_refused_in_words(tmp_path: Path, entries: dict[str, Any]) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(json.dumps(entries).encode(), 8))
    shard = read_or_words(path, read_shard)
    if isinstance(shard, Shard):
        assert sum(tensor.size_bytes for tensor in shard.tensors) == 8


@given(st.lists(st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.lists(st.integers(0, 5), max_size=3)), max_size=6))
@SAME_FOLDER
def test_whatever_is_written_is_read(tmp_path: Path, tensors: list[tuple[str, list[int]]]) -> None:
    named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    shard = read_shard(write_file(tmp_path / "m.safetensors", named))
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in shard.tensors} == {
        (name, dtype, tuple(shape)) for name, (dtype, shape) in named.items()
    }


@pytest.mark.parametrize("has_index", [True, False])
def test_parts_add_up(tmp_path: Path, has_index: bool) -> None:
    shards = read_shards(write_shards(tmp_path / "m", has_index=has_index))
    assert [shard.path.name for shard in shards] == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert {tensor.name for shard in shards for tensor in shard.tensors} == set(DENSE)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_missing_part_is_named(tmp_path: Path, has_index: bool) -> None:
    folder = write_shards(tmp_path / "m", count=4, has_index=has_index)
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00003-of-00004.safetensors").unlink()
    assert "a part is missing: model-00002-of-00004.safetensors and 1 more" in refusal(folder)


def test_a_part_of_another_model_is_found_out(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m")
    write_file(folder / "model-00002-of-00002.safetensors", {"other.weight": ("F32", (4,))})
    assert "model-00002-of-00002.safetensors should have" in refusal(folder)


def test_a_part_with_too_much_is_found_out(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m")
    names = list(DENSE)[1::2]
    more = {name: DENSE[name] for name in names} | {"other.weight": ("F32", (4,))}
    write_file(folder / "model-00002-of-00002.safetensors", more)
    assert f"has other.weight, which {INDEX} does not list" in refusal(folder)


def test_parts_of_two_models_without_an_index(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", has_index=False)
    write_file(folder / "model-00001-of-00003.safetensors", DENSE)
    assert f"without {INDEX} it is unknown which files belong together" in refusal(folder)


def test_the_same_part_twice(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", has_index=False)
    first = folder / "model-00001-of-00002.safetensors"
    (folder / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    assert "both have model.embed_tokens.weight" in refusal(folder)


def test_two_files_of_which_none_is_numbered(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    write_file(folder / "adapter.safetensors", {})
    assert "belong together: adapter.safetensors, model.safetensors" in refusal(folder)


@pytest.mark.parametrize("count", ["00000", "99999"])
def test_a_lying_number_of_parts(tmp_path: Path, count: str) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / f"model-00001-of-{count}.safetensors")
    assert "belong together" in refusal(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "it has no weight_map"),
        ({"weight_map": []}, "it has no weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "it places a in ../../etc/passwd"),
        ({"weight_map": {"a": "x/y.safetensors"}}, "it places a in x/y.safetensors"),
        ({"weight_map": {"a": 5}}, "it places a in 5"),
        ({"weight_map": {"a": "A" * 300 + ".safetensors"}}, "it places a in AAAA"),
        (
            {"weight_map": {"a": "\x1b[2J\x1b[31mHACK.safetensors"}},
            "a part is missing: \ufffd[2J\ufffd[31mHACK.safetensors",
        ),
        ({"weight_map": {"a": "b\0.safetensors"}}, "it places a in"),
        ({"weight_map": {str(n): f"{n}.safetensors" for n in range(1025)}}, "it names 1025 files"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, index: dict[str, Any], words: str) -> None:
    folder = write_shards(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps(index))
    assert words in refusal(folder)


def test_json_files_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 30)
    assert f"it is {1 << 30} bytes long" in refusal(path, read_json)
    path.unlink()
    assert "no such file" in refusal(path, read_json)
    path.symlink_to("../../blobs/deadbeef")
    assert "a link to a missing file" in refusal(path, read_json)
    path.unlink()
    os.mkfifo(path)
    assert "it is not a regular file" in refusal(path, read_json)
    assert JSON_LIMIT_BYTES < 1 << 30


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    if not Path("/proc/self/attr/current").exists():
        pytest.skip("needs procfs, whose files say that they are empty")
    assert "its header's length alone takes 8" in refusal(Path("/proc/self/status"), read_shard)


def test_a_folder_is_no_gguf_file_and_a_file_no_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    with pytest.raises(ModelUnreadableError, match="a safetensors file"):
        read_model(folder / "model.safetensors")
    entries, end = header(DENSE)
    assert entries
    assert end == sum(tensor.size_bytes for tensor in read_shards(folder)[0].tensors)
    assert sys.getrecursionlimit() < 100_000  # or the nesting above would prove nothing
