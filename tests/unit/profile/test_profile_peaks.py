"""The memory peak of a served plan on the volume: what is kept of several, and what a broken file costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import VolumeError
from appliance.plan import CardPeak, MemoryPeak, Speculation, with_launch
from appliance.profile import ProfileStore
from tests.builders import key, profile
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, best

PLAN = replace(best(ADA), choices=())
CARD = CardPeak(device=PLAN.placement.shares[0].gpu.id, kv_mib=9000.5, ready_mib=20_000, peak_mib=20_600)
PEAK = MemoryPeak(plan=PLAN, cards=(CARD,))


def peak(beside_mib: int, kv_mib: float = 9000.5, **changes: Any) -> MemoryPeak:
    card = replace(CARD, kv_mib=kv_mib, ready_mib=1, peak_mib=round(kv_mib + beside_mib))
    return replace(PEAK, cards=(card,), **changes)


class Shelf:
    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.warnings: list[str] = []
        self.store = ProfileStore(folder, self.warnings.append)
        self.path = folder / f"{key().id}.peak"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "profiles")


def test_what_was_kept_is_read_back(shelf: Shelf) -> None:
    assert shelf.store.peak(key()) is None
    assert shelf.store.keep_peak(key(), PEAK) == PEAK
    assert shelf.store.peak(key()) == PEAK
    assert shelf.store.peak(key("b2")) is None
    assert shelf.store.all() == ()
    assert shelf.warnings == []


def test_of_one_configuration_the_highest_peak_beside_the_cache_stays(shelf: Shelf) -> None:
    high = peak(12_000, is_whole=True)
    shelf.store.keep_peak(key(), high)
    later = peak(11_000, kv_mib=10_000, plan=replace(PLAN, context=4096))
    assert shelf.store.keep_peak(key(), later) == replace(later, cards=high.cards, is_whole=True)
    higher = peak(12_500, kv_mib=8000)
    assert shelf.store.keep_peak(key(), higher) == replace(higher, is_whole=True)


@pytest.mark.parametrize(
    "other",
    [
        with_launch(PLAN, max_num_batched_tokens=512),
        replace(PLAN, kv_type="fp8"),
        replace(PLAN, speculation=Speculation(kind="ngram", tokens=16)),
    ],
)
def test_of_two_configurations_the_one_whose_work_was_seen_stays(other: Any, shelf: Shelf) -> None:
    whole, begun = peak(12_000, is_whole=True), peak(9000, plan=other)
    shelf.store.keep_peak(key(), begun)
    assert shelf.store.keep_peak(key(), whole) == whole
    assert shelf.store.keep_peak(key(), begun) == whole
    assert shelf.store.keep_peak(key(), replace(begun, is_whole=True)) == replace(begun, is_whole=True)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(json.dumps(asdict(PEAK)))
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        json.dumps(asdict(PEAK)).encode()[:-9],
        changed(lambda found: found.pop("cards")),
        changed(lambda found: found.update(more=1)),
        changed(lambda found: found.update(cards=[])),
        changed(lambda found: found["cards"][0].update(device="GPU-other")),
        changed(lambda found: found["cards"][0].update(peak_mib=-1)),
        changed(lambda found: found["cards"][0].update(peak_mib=19_999)),
        changed(lambda found: found["cards"][0].update(kv_mib=float("nan"))),
        changed(lambda found: found["cards"][0].update(ready_mib="many")),
        changed(lambda found: found["plan"].update(engine="another")),
    ],
)
def test_what_cannot_be_read_is_said_and_set_aside_by_the_next_that_is_kept(data: bytes, shelf: Shelf) -> None:
    shelf.path.write_bytes(data)
    assert shelf.store.peak(key()) is None
    assert shelf.path.read_bytes() == data
    assert len(shelf.warnings) == 1
    assert shelf.store.keep_peak(key(), PEAK) == PEAK
    assert shelf.path.with_suffix(".peak-corrupt").read_bytes() == data
    assert shelf.store.peak(key()) == PEAK


def test_a_folder_in_its_place_is_no_reason_to_fail_a_start(shelf: Shelf) -> None:
    shelf.path.mkdir()
    assert shelf.store.peak(key()) is None
    assert "Is a directory" in shelf.warnings[0]
    with pytest.raises(VolumeError):
        shelf.store.keep_peak(key(), PEAK)


def test_it_goes_with_its_profile(shelf: Shelf) -> None:
    shelf.store.keep_peak(key(), PEAK)
    shelf.store.save(profile())
    shelf.store.forget(key().id)
    assert shelf.store.peak(key()) is None
