"""Weights that the CPU's kernels copy into layouts of their own, by what the variant is compiled for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.engines.llama.planning.memory.memory import MIB, copies, growth_of
from appliance.engines.llama.process.server import parse_allocated
from appliance.model import Matrices, Model
from tests.builders import SMALL, with_variants

ALL = ("x64", "haswell", "skylakex", "zen4", "sapphirerapids", "armv8.0_1", "armv8.2_2", "armv8.6_2")
ISA = {variant.name: variant.isa for variant in with_variants(*ALL).cpu_variants}


def kind(name: str, *, rows_by: int = 32, columns_by: int = 32, is_bank: bool = False, mib: float = 1.0) -> Matrices:
    return Matrices(
        type_name=name,
        rows_by=rows_by,
        columns_by=columns_by,
        is_bank=is_bank,
        is_tied=False,
        size_bytes=int(mib * MIB),
    )


@pytest.mark.parametrize(
    ("variant", "matrices", "growth"),
    [
        ("x64", kind("Q4_0"), None),
        ("haswell", kind("Q4_0"), 1.0),
        ("haswell", kind("Q4_0", rows_by=8), 1.0),
        ("haswell", kind("Q4_0", rows_by=4), None),
        ("haswell", kind("Q4_1"), None),
        ("haswell", kind("Q6_K"), None),
        ("haswell", kind("Q2_K"), None),
        ("skylakex", kind("Q2_K"), 1.0),
        ("zen4", kind("Q8_0"), None),
        # ggml_backend_amx_get_alloc_size: bytes of a block in the file, and in the copy
        ("sapphirerapids", kind("Q4_0"), 1.0),
        ("sapphirerapids", kind("Q4_1"), 1.0),
        ("sapphirerapids", kind("Q8_0"), 38 / 34),
        ("sapphirerapids", kind("Q4_K"), 148 / 144),
        ("sapphirerapids", kind("Q5_K"), 180 / 176),
        ("sapphirerapids", kind("Q6_K"), 1.0),
        ("sapphirerapids", kind("IQ4_XS"), 138 / 136),
        ("sapphirerapids", kind("F16"), 1.0),
        ("sapphirerapids", kind("F16", columns_by=4), None),
        ("sapphirerapids", kind("F32"), None),
        ("sapphirerapids", kind("BF16"), None),
        ("sapphirerapids", kind("Q5_0"), None),
        # what AMX does not take, CPU_REPACK may
        ("sapphirerapids", kind("Q8_0", rows_by=16), None),
        ("sapphirerapids", kind("Q4_K", rows_by=16), 1.0),
        ("sapphirerapids", kind("Q4_K", is_bank=True), 1.0),
        ("sapphirerapids", kind("Q6_K", is_bank=True), None),
        ("sapphirerapids", kind("MXFP4"), 1.0),
        ("armv8.0_1", kind("Q4_0"), None),
        ("armv8.2_2", kind("Q8_0", rows_by=4), 1.0),
        ("armv8.6_2", kind("Q6_K", rows_by=8), 1.0),
        ("armv8.6_2", kind("Q6_K", rows_by=4), None),
    ],
)
def test_what_is_copied_and_how_much_it_grows(variant: str, matrices: Matrices, growth: float | None) -> None:
    assert growth_of(matrices, ISA[variant]) == growth


def smollm() -> Model:
    """SmolLM2-135M at Q4_1: 66,355,200 bytes of matrices, and a tied embedding of Q8_0."""
    matrices = (
        replace(kind("Q4_1"), size_bytes=66_355_200),
        replace(kind("Q8_0"), is_tied=True, size_bytes=30_081_024),
    )
    return replace(SMALL, matrices=matrices)


def test_amx_takes_what_was_seen_on_a_cpu_that_has_it() -> None:
    """facts/measured.md: this model's AMX buffer was 95.34 MiB."""
    found = copies(smollm(), ISA["sapphirerapids"])
    assert found.made == pytest.approx(95.34, abs=0.005)
    assert found.tied == pytest.approx(30_081_024 * 38 / 34 / MIB)
    assert found.originals == pytest.approx(66_355_200 / MIB)
    assert found.more == pytest.approx(found.tied)
    for variant in ("x64", "haswell", "zen4"):
        assert copies(smollm(), ISA[variant]).made == 0


def test_the_buffers_of_the_copies_are_read_from_the_log() -> None:
    lines = [
        "0.00.070.001 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB",
        "0.00.070.002 I load_tensors:          AMX model buffer size =    95.34 MiB",
        "0.00.070.003 I load_tensors:   CPU_REPACK model buffer size =    10.00 MiB",
    ]
    found = parse_allocated(lines)
    assert (found.model, found.repacked) == (pytest.approx(197.44), pytest.approx(105.34))
