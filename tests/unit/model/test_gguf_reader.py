"""The GGUF reader compared with the `gguf` package, and with invalid files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.errors import ModelUnreadableError
from appliance.model import read_model
from appliance.model.formats.ggml_types import GGML_TYPES
from appliance.model.formats.gguf import read_gguf
from tests.builders import examples
from tests.unit.model.gguf_files import (
    F32,
    LLAMA,
    array,
    assert_as_oracle,
    header,
    key,
    refusal,
    tensor,
    text,
    write_model,
)

SAME_FILE = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def refusal_of(data: bytes, folder: Path) -> str:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return refusal(path)


@pytest.mark.parametrize("alignment", [None, 64, 4096])
def test_reads_what_the_oracle_reads(tmp_path: Path, alignment: int | None) -> None:
    metadata = LLAMA | {
        "llama.attention.head_count_kv": [2, 0],
        "general.name": "käfer\nwith a line feed",
        "tokenizer.chat_template": "{{ x }}" * 1000,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.add_bos_token": True,
        "general.languages": ["en", "de"],
    }
    assert_as_oracle(write_model(tmp_path / "model.gguf", metadata=metadata, alignment=alignment))


@pytest.mark.parametrize("kind", sorted(set(GGML_TYPES) & {int(kind) for kind in gguf.GGML_QUANT_SIZES}))
def test_every_type_has_the_oracles_block(kind: int) -> None:
    ours = GGML_TYPES[kind]
    assert ours.name == gguf.GGMLQuantizationType(kind).name
    # The package says 40 bytes for Q8_1; ggml-common.h has two halves and 32 bytes. No file holds that type.
    if ours.name != "Q8_1":
        assert (ours.block_size, ours.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]


def test_no_type_of_the_oracle_is_missing() -> None:
    assert {int(kind) for kind in gguf.GGML_QUANT_SIZES} <= set(GGML_TYPES)


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGML_QUANT_SIZES if kind.name != "Q8_1"], ids=lambda k: k.name)
def test_sizes_of_a_tensor_of_every_type(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    shape = (gguf.GGML_QUANT_SIZES[kind][0] * 2, 3, 2)
    assert_as_oracle(write_model(tmp_path / "model.gguf", tensors=[("a", shape, kind), ("b", (4,), F32)]))


def test_a_big_endian_file_is_refused_in_words(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", endianess=gguf.GGUFEndian.BIG)
    assert "at byte 4: expected little-endian numbers, found a big-endian GGUF file" in refusal(path)


def test_version_2_is_read_and_others_are_not(tmp_path: Path) -> None:
    data = bytearray(write_model(tmp_path / "valid.gguf").read_bytes())
    data[4] = 2
    (tmp_path / "two.gguf").write_bytes(data)
    assert read_gguf(tmp_path / "two.gguf").version == 2
    for version in (0, 1, 4):
        data[4] = version
        assert f"at byte 4: expected GGUF version 2 or 3, found version {version}" in refusal_of(bytes(data), tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at byte 0: expected a GGUF file, found an empty file of 0 bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "at byte 0: expected the letters GGUF, found a PNG image"),
        (b"PK\x03\x04" + bytes(99), "a ZIP archive"),
        (b"<!doctype html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (struct.pack("<Q", 99) + b'{"a":1}', "a safetensors file"),
        (b"GG", "expected the letters GGUF, found b'GG'"),
        (b"GGUF", "at byte 4: expected a version, found the end of the file at byte 4"),
        (b"GGUF\x03\0\0\0\1", "at byte 8: expected a tensor count, found the end of the file at byte 9"),
    ],
)
def test_what_is_no_gguf_file_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal_of(data, tmp_path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "a device, pipe or socket" in refusal(tmp_path / "pipe.gguf")
    assert "a directory" in refusal(tmp_path)
    assert "no such file or directory" in refusal(tmp_path / "missing.gguf")
    assert "not a directory" in refusal(write_model(tmp_path / "model.gguf") / "below")


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    path.chmod(0)
    assert "permission denied" in refusal(path)


HUGE = 1 << 63
LIES = {
    "keys beyond the file": (header(keys=10**9), "at byte 16: expected a key count of at most 0, found 1000000000"),
    "keys beyond any file": (header(keys=2**64 - 1) + bytes(200_000), "a key count of at most 8192"),
    "tensors beyond the file": (header(tensors=HUGE), "at byte 8: expected a tensor count of at most 0"),
    "tensors beyond any file": (header(tensors=65537) + bytes(2_000_000), "a tensor count of at most 65536"),
    "long key": (header(keys=1) + struct.pack("<Q", HUGE) + bytes(20), "at byte 24: expected key 0 of 1 of at most"),
    "key over the limit": (header(keys=1) + text("k" * 1025) + bytes(20), "key 0 of 1 of at most 1024 bytes"),
    "empty key": (header(keys=1) + text("") + bytes(20), "a name for key 0 that is new, found ''"),
    "same key twice": (header(keys=2) + key("k", 4, bytes(4)) * 2, "a name for key 1 that is new, found 'k'"),
    "unknown kind": (header(keys=1) + key("k", 13, bytes(9)), "a type from 0 to 12 for k, found 13"),
    "string of 2^63": (header(keys=1) + key("k", 8, struct.pack("<Q", HUGE)), "the text of k of at most 0 bytes"),
    "array of arrays": (header(keys=1) + key("k", 9, array(9, 1, array(4, 0))), "found an array of arrays"),
    "array of nothing known": (header(keys=1) + key("k", 9, array(77, 1)), "a type from 0 to 12, found 77"),
    "array of 2^63": (header(keys=1) + key("k", 9, array(4, HUGE)), "a number of entries of k of at most 0"),
    "array of 2^61 longs": (header(keys=1) + key("k", 9, array(10, 1 << 61, bytes(8))), "entries of k of at most 1"),
    "strings beyond the file": (header(keys=1) + key("k", 9, array(8, 10**12)), "a number of entries of k of at most"),
    "string that lies": (
        header(keys=1) + key("k", 9, array(8, 2, text("a") + struct.pack("<Q", HUGE))),
        "the last of the 2 texts of k to end by byte 9223372036854775874",
    ),
    "string that lies early": (
        header(keys=1) + key("k", 9, array(8, 3, struct.pack("<Q", 2**64 - 1) + text("a") * 2)),
        "entry 1 of the 3 texts of k at byte 18446744073709551672",
    ),
    "alignment 24": (header(keys=1) + key("general.alignment", 4, struct.pack("<I", 24)), "a power of two"),
    "alignment 0": (header(keys=1) + key("general.alignment", 4, bytes(4)), "a power of two"),
    "alignment yes": (header(keys=1) + key("general.alignment", 7, b"\1"), "a power of two"),
    "five dimensions": (header(tensors=1) + tensor("a", (1,) * 5, 0, 0), "at most 4 dimensions of a, found 5"),
    "product overflows": (header(tensors=1) + tensor("a", (1 << 32, 1 << 32), 0, 0), "a shape of a that can exist"),
    "zero hides overflow": (header(tensors=1) + tensor("a", (HUGE, 0), 0, 0), "a shape of a that can exist"),
    "larger than the file": (header(tensors=1) + tensor("a", (1 << 40,), 0, 0), "4398046511104 bytes of tensor a"),
    "half a block": (header(tensors=1) + tensor("a", (31,), 2, 0), "rows of a in blocks of 32 (Q4_0), found 31"),
    "removed type": (header(tensors=1) + tensor("a", (32,), 31, 0), "found Q4_0_4_4, which GGUF no longer has"),
    "unknown type": (header(tensors=1) + tensor("a", (32,), 999, 0), "a ggml type for a, found type 999"),
    "long name": (header(tensors=1) + tensor("a" * 64, (1,), 0, 0), "the name of tensor 0 of 1 of at most 63 bytes"),
    "same name": (header(tensors=2) + tensor("a", (8,), 0, 0) * 2 + bytes(99), "a name for tensor 1 that is new"),
    "overlap": (
        header(tensors=2) + tensor("a", (8,), 0, 0) + tensor("b", (8,), 0, 0) + bytes(200),
        "tensor b at offset 32 of the data, found offset 0",
    ),
    "offset past the end": (
        header(tensors=1) + tensor("a", (8,), 0, HUGE) + bytes(99),
        "tensor a at offset 0 of the data, found offset 9223372036854775808",
    ),
    "control characters": (header(tensors=1) + tensor("\x1b[2J", (8,), 0, 1) + bytes(99), "tensor \ufffd[2J at offset"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_where_it_stands(tmp_path: Path, name: str) -> None:
    data, words = LIES[name]
    assert words in refusal_of(data, tmp_path)


@pytest.mark.thorough
def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", tokens=5)
    data = whole.read_bytes()
    header_bytes, last = read_gguf(whole).header_bytes, read_gguf(whole).tensors[-1]
    end = last.offset + last.size_bytes
    cut = tmp_path / "cut.gguf"
    for length in [*range(header_bytes + 1), *range(header_bytes + 2, end, 499), end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelUnreadableError, match=r"at byte \d+: expected .+, found "):
            read_gguf(cut)


@SAME_FILE
@given(data=st.binary(max_size=400), starts_right=st.booleans())
def test_random_bytes_are_refused(tmp_path: Path, data: bytes, starts_right: bool) -> None:
    refusal_of((header(tensors=1, keys=2) if starts_right else b"") + data, tmp_path)


@SAME_FILE
@given(data=st.data())
def test_flipped_bits_give_facts_or_a_refusal(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.gguf"
    whole = bytearray(write_model(path, tokens=3).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 1500))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    try:
        layers = read_model(path).layers
    except ModelUnreadableError:
        return
    assert layers > 0
