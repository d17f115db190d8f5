"""The loss by fewer experts on the volume, and where uses and routes of experts are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.abilities.expert_loss import KeptExpertLoss
from appliance.errors import VolumeError
from appliance.model.files.quantized import Loss
from appliance.profile import ProfileStore
from appliance.profile.record import Key
from appliance.serve.model.experts import expert_files
from appliance.settings import resolve_settings
from tests.builders import SMALL

KEY = Key(parts={"model": "a" * 32})
LOSS = Loss(difference=0.05, standard_error=0.01, tokens=4096, perplexity=21.0, origin_perplexity=20.0)
MIXTURE = replace(SMALL, experts=16, experts_used=4, expert_bytes=96_000_000)


def test_a_loss_is_read_back_and_goes_with_its_profile(tmp_path: Path) -> None:
    kept = KeptExpertLoss(tmp_path, KEY, pytest.fail)
    assert kept.load() is None
    kept.save(LOSS)
    assert kept.load() == LOSS
    ProfileStore(tmp_path, pytest.fail).forget(KEY.id)
    assert kept.load() is None


@pytest.mark.parametrize("text", ["", "[]", '{"difference": 1}', "{" * 10])
def test_a_damaged_loss_counts_as_none_and_is_named(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    kept = KeptExpertLoss(tmp_path, KEY, said.append)
    kept.save(LOSS)
    (tmp_path / f"{KEY.id}.experts").write_text(text)
    assert kept.load() is None
    assert "cannot be read, not used" in said[0]
    with pytest.raises(VolumeError):
        KeptExpertLoss(tmp_path / "nowhere", KEY, pytest.fail).save(LOSS)


def found(folder: Path, model: Any, said: list[str], **flags: str) -> Any:
    settings = resolve_settings({"data_dir": str(folder), **flags}, {})
    start: Any = SimpleNamespace(
        settings=settings,
        inputs=SimpleNamespace(model=model),
        engine=SimpleNamespace(settings=frozenset({"moe_slots"})),
        key=KEY,
    )

    def say(_name: str, words: str, **_facts: object) -> None:
        said.append(words)

    report: Any = SimpleNamespace(warning=say, info=say)
    return expert_files(start, report)


def test_uses_are_kept_for_a_mixture_and_routes_on_request(tmp_path: Path) -> None:
    said: list[str] = []
    assert found(tmp_path, SMALL, said) is None, "no experts"
    files = found(tmp_path, MIXTURE, said)
    assert (files.uses, files.trace) == (tmp_path / "cache/experts/aaaaaaaaaaaaaaaa.uses", None)
    assert not said
    traced = found(tmp_path, MIXTURE, said, trace_experts="on")
    assert traced.trace == tmp_path / "cache/experts/small-aaaaaaaaaaaaaaaa.csv"
    assert said[0].endswith("an expert has 0.2 MB"), "96 MB of 30 layers with 16 each"


def test_a_volume_that_refuses_is_a_warning_or_ends_a_start_that_was_to_record(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    said: list[str] = []
    assert found(tmp_path, MIXTURE, said) is None
    assert "uses of experts are not kept over a restart" in said[0]
    with pytest.raises(VolumeError, match=r"trace_experts is on \(flag --trace-experts\), and nothing can be") as error:
        found(tmp_path, MIXTURE, said, trace_experts="on")
    assert error.value.exit_code == 50
