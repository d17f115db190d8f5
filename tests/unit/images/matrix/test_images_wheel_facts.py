"""What an engine from wheels compiles when it runs, and which attention it takes; planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from images.errors import MatrixError
from images.matrix import matrix, wheel_facts


@pytest.fixture
def data(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((project / "images/facts/vllm.yaml").read_text("utf-8"))
    return found


def test_every_chip_of_its_cells_has_an_attention(project: Path) -> None:
    known = wheel_facts.facts("vllm")
    for cell in matrix.load(project).cells:
        if cell.engine.name == "vllm" and cell.target.cuda:
            assert cell.sm_forms
            for form in cell.sm_forms:
                row = known.attention_of(form.sm)
                assert row is not None
                assert row.order
    turing = known.attention_of("75")
    assert turing is not None
    assert turing.order == ("TRITON_ATTN",)
    assert any("DeviceCapability(8, 0)" in source for source in known.cite(turing.sources))
    assert known.attention_of("70") is None


def test_an_engine_without_facts_is_named() -> None:
    with pytest.raises(MatrixError, match=r"images/facts/sglang\.yaml cannot be read: No such file") as caught:
        wheel_facts.facts("sglang")
    assert caught.value.hint == "an engine from wheels needs it: what it compiles when it runs"


def _unsourced(data: dict[str, Any]) -> None:
    data["jits"][0]["sources"] = []


def _stranger(data: dict[str, Any]) -> None:
    data["attention"][0]["sources"].append("flash-atn")


def _unused(data: dict[str, Any]) -> None:
    data["sources"]["rumour"] = data["sources"]["gaps"]


def _twice(data: dict[str, Any]) -> None:
    data["attention"][1]["sms"].append("75")


def _misspelt(data: dict[str, Any]) -> None:
    data["jits"][0]["compils"] = data["jits"][0].pop("compiles")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_unsourced, "x.yaml: jits.0.sources"),
        (_stranger, "a row cites a source that is not there: flash-atn"),
        (_unused, "no row cites the source: rumour"),
        (_twice, "attention of a chip is there twice: 75"),
        (_misspelt, "x.yaml: unknown key: jits.0.compils"),
    ],
)
def test_a_planted_fault_is_refused(data: dict[str, Any], spoil: Any, said: str) -> None:
    spoil(data)
    with pytest.raises(MatrixError) as caught:
        wheel_facts.parse_facts(data, name="x.yaml")
    assert said in caught.value.message
