"""The facts and their validator: each planted fault is a line that somebody could write."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from images.errors import MatrixError
from images.matrix import compat
from images.proof import gate
from tests.unit.images.conftest import PROJECT

FORMS = [f"{sm}{suffix}" for sm in compat.facts().sms for suffix in ("", "a", "f")]


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PROJECT / compat.FACTS_NAME).read_text("utf-8"))
    return found


@pytest.fixture
def data(written: dict[str, Any]) -> dict[str, Any]:
    """The test's own to damage."""
    return copy.deepcopy(written)


def test_the_committed_facts_are_sound_and_in_order(data: dict[str, Any]) -> None:
    known = compat.parse_facts(data)
    assert list(known.releases) == sorted(known.releases, key=compat.numbers)
    assert list(known.sms) == sorted(known.sms, key=int)
    assert known.releases["12.4"].forms == ("70", "75", "80", "86", "87", "89", "90", "90a")
    assert "120f" in known.releases["12.9"].forms
    assert "120f" not in known.releases["12.8"].forms


def test_a_source_says_what_how_and_when() -> None:
    text = str(compat.facts().sources["cuda-gpus"])
    assert text == "NVIDIA, CUDA GPU Compute Capability, https://developer.nvidia.com/cuda-gpus (document, 2026-11-21)"


def _drop_source_of_driver(data: dict[str, Any]) -> None:
    del data["releases"][0]["sources"]["driver"]


def _cite_nothing(data: dict[str, Any]) -> None:
    data["hosts"][0]["sources"] = []


def _cite_a_stranger(data: dict[str, Any]) -> None:
    data["gpus"][0]["source"] = "cuda-gpu"


def _leave_a_source_unused(data: dict[str, Any]) -> None:
    data["sources"]["rumour"] = {**data["sources"]["cuda-gpus"]}


def _misspell(data: dict[str, Any]) -> None:
    data["releases"][0]["gcc_mx"] = data["releases"][0].pop("gcc_max")


def _no_date(data: dict[str, Any]) -> None:
    del data["sources"]["cuda-gpus"]["date"]


def _twice(data: dict[str, Any]) -> None:
    data["releases"].append(data["releases"][0])


def _two_names(data: dict[str, Any]) -> None:
    data["gpus"][0]["names"].append("NVIDIA RTX 5090")


def _suffix_without_target(data: dict[str, Any]) -> None:
    data["releases"][0]["arch_specific"].append("100")


def _chip_without_row(data: dict[str, Any]) -> None:
    data["releases"][0]["targets"].append("72")


def _driver_below_its_floor(data: dict[str, Any]) -> None:
    data["releases"][-1]["driver"] = "570.26"


def _rubbish_behind_a_version(data: dict[str, Any]) -> None:
    data["releases"][-1]["cuda"] = "13.4x"


def _rubbish_behind_a_driver(data: dict[str, Any]) -> None:
    data["releases"][-1]["driver"] = "615.71.09-open"


def _no_driver(data: dict[str, Any]) -> None:
    data["releases"][0]["minor_floor"] = "R525"


def _tegra_unsourced(data: dict[str, Any]) -> None:
    next(row for row in data["sms"] if row["sm"] == "87")["sources"].pop("tegra")


def _jit_unsourced(data: dict[str, Any]) -> None:
    """None is a fact too, where somebody looked."""
    data["releases"][0]["sources"].pop("cublas_jit")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_drop_source_of_driver, "CUDA 12.4 has no source for: driver"),
        (_jit_unsourced, "CUDA 12.4 has no source for: cublas_jit"),
        (_cite_nothing, "hosts.0.sources"),
        (_cite_a_stranger, "a source that is not there: cuda-gpu"),
        (_leave_a_source_unused, "no row cites the source: rumour"),
        (_misspell, "releases.0.gcc_mx"),
        (_no_date, "sources.cuda-gpus.date"),
        (_twice, "release is there twice: 12.4"),
        (_two_names, "GPU name is there twice: rtx 5090"),
        (_suffix_without_target, "no target of it: 100"),
        (_chip_without_row, "no row under sms: 72"),
        (_driver_below_its_floor, "older than its floor: 570.26"),
        (_no_driver, "minor_floor"),
        (_rubbish_behind_a_version, "13.4x"),
        (_rubbish_behind_a_driver, "615.71.09-open"),
        (_tegra_unsourced, "Tegra 87 has no source for: tegra"),
    ],
)
def test_a_planted_fault_is_refused(data: dict[str, Any], spoil: Any, said: str) -> None:
    spoil(data)
    with pytest.raises(MatrixError) as caught:
        compat.parse_facts(data)
    assert caught.value.message.startswith("images/facts/nvidia.yaml: ")
    assert said in caught.value.message


def test_a_misspelt_key_names_the_near_miss(data: dict[str, Any]) -> None:
    data["releases"][0]["gcc_mx"] = 13
    with pytest.raises(MatrixError) as caught:
        compat.parse_facts(data)
    assert caught.value.hint == "perhaps you meant gcc_max"


@given(data=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_values_that_are_no_facts_are_refused_in_words(data: object) -> None:
    with pytest.raises(MatrixError, match=r"^images/facts/nvidia\.yaml"):
        compat.parse_facts(data)


@pytest.mark.parametrize(
    ("form", "sm", "runs"),
    [
        ("80", "86", True),
        ("86", "80", False),
        ("80", "90", False),
        ("90", "90", True),
        ("90a", "90", True),
        ("100", "103", True),
        ("100a", "103", False),
        ("100f", "103", True),
        ("103f", "100", False),
        ("120a", "121", False),
        ("120f", "121", True),
        ("100", "110", False),
        ("80", "87", False),
        ("87", "89", False),
        ("87", "87", True),
    ],
)
def test_the_family_rule(form: str, sm: str, runs: bool) -> None:
    assert compat.runs_on(form, sm) is runs


@given(form=st.sampled_from(FORMS), sm=st.sampled_from(sorted(compat.facts().sms)))
def test_the_gate_judges_by_the_same_rule(form: str, sm: str) -> None:
    if "101" not in (sm, form.rstrip("af")):  # Thor before CUDA 13, and no cell's: the gate does not know it as a Tegra
        assert compat.runs_on(form, sm) is gate.runs_natively(form, int(sm))


@pytest.mark.parametrize(
    ("cuda", "sm", "is_compressed", "sass", "ptx"),
    [
        ("12.4", "90", True, "525", "550.54.14"),
        ("12.8", "75", False, "525", "570.26"),
        ("12.8", "75", True, "550.54.14", "570.26"),  # code made with --compress-mode
        ("12.8", "120", True, "570.26", "570.26"),  # the chip is younger than the floor
        ("12.9", "121", True, "575.51.03", "575.51.03"),
        ("13.0", "120", True, "580", "580.65.06"),
        ("13.0", "110", True, "580", "580"),  # drivers numbered apart: a Thor with CUDA 13.0 says 580.00
        ("13.4", "87", True, "580", "615"),
        ("13.4", "75", True, "580", "615.71.09"),
    ],
)
def test_two_floors(cuda: str, sm: str, is_compressed: bool, sass: str, ptx: str) -> None:
    known = compat.facts()
    floors = compat.floors(known.releases[cuda], known.sms[sm], is_compressed=is_compressed)
    assert (floors.sass, floors.ptx) == (sass, ptx)


@given(cuda=st.sampled_from(sorted(compat.facts().releases)), sm=st.sampled_from(sorted(compat.facts().sms)))
def test_ptx_never_needs_less_than_machine_code(cuda: str, sm: str) -> None:
    known = compat.facts()
    floors = compat.floors(known.releases[cuda], known.sms[sm], is_compressed=True)
    assert compat.numbers(floors.ptx) >= compat.numbers(floors.sass)
