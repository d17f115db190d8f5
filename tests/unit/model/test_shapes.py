"""The models that tests use: the engine's own package can read them, and random weights are finite."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.builders import some
from tests.shapes import PUBLISHED, QUANTIZATIONS, SMALL, write_gguf


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", some(tuple(QUANTIZATIONS)))
def test_random_weights_are_small_numbers(tmp_path: Path, quantization: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL["sliding-sinks"], quantization=quantization, with_data=True)
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
        assert (np.abs(values).max() <= 1, values.std() < 0.05) == (True, True), tensor.name


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    first, second, other = (
        write_gguf(tmp_path / f"{number}.gguf", SMALL["gqa"], with_data=True, seed=number // 2).read_bytes()
        for number in range(3)
    )
    assert first == second
    assert first != other
    assert len(first) == len(other)


def test_a_hole_costs_nothing_and_has_the_length_of_the_whole(tmp_path: Path) -> None:
    hole = write_gguf(tmp_path / "hole.gguf", PUBLISHED["deepseek-v3"])
    assert hole.stat().st_size > 400e9
    assert hole.stat().st_blocks * 512 < 1_000_000
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", SMALL["kda"]))
    assert reader.tensors[-1].data_offset + reader.tensors[-1].n_bytes <= (tmp_path / "m.gguf").stat().st_size


def test_a_changed_shape_keeps_its_arrays_as_long_as_its_layers(tmp_path: Path) -> None:
    shape = SMALL["nemotron-h"].changed(block_count=6, attention__head_count=4)
    assert shape.metadata["feed_forward_length"] == [0, 512, 0, 512, 0, 512]
    assert (shape.layers, shape.get("attention.head_count")) == (6, 4)
    assert write_gguf(tmp_path / "m.gguf", shape).exists()


def test_every_published_shape_says_where_it_is_from() -> None:
    assert all(shape.source != "made up" for shape in PUBLISHED.values())
