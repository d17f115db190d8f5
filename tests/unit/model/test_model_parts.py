"""Models split into several files, written by the `gguf` package and named as by llama-gguf-split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from appliance.errors import ModelUnreadableError
from appliance.model import digest, list_models, plain_name, read_model
from tests.unit.model.gguf_files import LLAMA, write_model


def write_split(folder: Path, *, each: int = 2, tensors: int = 6, **changes: Any) -> list[Path]:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=each)
    for key, value in {**LLAMA, **changes}.items():
        writer.add_uint32(key, value)
    writer.add_token_list([f"token{number}" for number in range(100)])
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), dtype=np.float32))
    for number in range(tensors - 1):
        writer.add_tensor(f"blk.{number % 2}.t{number}.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def refusal(path: Path) -> str:
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(path)
    assert caught.value.hint
    return caught.value.message


def test_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    model = read_model(parts[0])
    assert len(parts) == 3
    assert model.parts == tuple(parts)
    assert model.path == parts[0]
    assert model.file_bytes == sum(part.stat().st_size for part in parts)
    assert model.weights_bytes == 4 * (100 * 64 + 5 * 64 * 64)
    assert list_models(tmp_path) == (parts[0],)
    assert plain_name(parts[0]) == "m"


def test_digest_sees_a_change_in_any_part(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    before = digest(parts, 100)
    assert before.size == sum(part.stat().st_size for part in parts)
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert digest(parts, 100).key != before.key


def test_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].unlink()
    assert f"a part is missing: {parts[1].name}" in refusal(parts[0])


def test_later_part_is_refused_and_the_first_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadableError) as caught:
        read_model(write_split(tmp_path)[1])
    assert "it is part 2 of 3, and the first is" in caught.value.message
    assert (caught.value.hint or "").endswith("-00001-of-00003.gguf")


def test_renamed_first_part_is_refused(tmp_path: Path) -> None:
    first = write_split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    assert "its name does not say that it is the first" in refusal(first)


def test_swapped_parts_are_refused(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    parts[1].write_bytes(third)
    assert "it should be part 2 of 3: split.no is 2" in refusal(parts[0])


def test_part_of_another_model_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    parts = write_split(tmp_path / "one")
    foreign = write_split(tmp_path / "other", tensors=5, each=2)
    parts[2].write_bytes(foreign[2].read_bytes())
    assert "5 tensors, but the first announces 6" in refusal(parts[0])


def test_cut_part_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    assert parts[2].name in refusal(parts[0])


@pytest.mark.parametrize("count", [70000, 1025])
def test_lying_count_is_refused_before_anything_is_opened(tmp_path: Path, count: int) -> None:
    path = write_model(tmp_path / "m-00001-of-00002.gguf", metadata={**LLAMA, "split.count": count})
    assert "split.count must be a whole number up to 1024" in refusal(path)
