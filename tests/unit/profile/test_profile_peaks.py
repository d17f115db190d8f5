"""Memory peaks of served plans on the volume: merging, and damaged files."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ConfigError, VolumeError
from appliance.plan import CardPeak, MemoryPeak, Speculation, with_launch
from appliance.profile import ProfileStore
from appliance.profile.peaks import KEPT_MAX
from tests.builders import key, profile
from tests.golden.vllm_plans import hardware
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, CPU, best

GPUS = hardware(ADA).gpus.gpus
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

    def keep(self, *peaks: MemoryPeak) -> tuple[MemoryPeak, ...]:
        """Keep these peaks; return all peaks that are in the store."""
        for each in peaks:
            assert self.store.keep_peak(key(), each, GPUS)
        return self.store.peaks(key(), GPUS)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "profiles")


def test_what_was_kept_is_read_back(shelf: Shelf) -> None:
    assert shelf.store.peaks(key(), GPUS) == ()
    assert shelf.keep(PEAK) == (PEAK,)
    assert shelf.store.peaks(key("b2"), GPUS) == ()
    assert shelf.store.all() == ()
    assert shelf.warnings == []


def test_of_one_configuration_the_highest_peak_beside_the_cache_stays(shelf: Shelf) -> None:
    high = peak(12_000, is_whole=True)
    later = peak(11_000, kv_mib=10_000, plan=replace(PLAN, context=4096))
    assert shelf.keep(high, later) == (replace(later, cards=high.cards, is_whole=True),)
    higher = peak(12_500, kv_mib=8000)
    assert shelf.keep(higher) == (replace(higher, is_whole=True),)


@pytest.mark.parametrize(
    "other",
    [
        with_launch(PLAN, max_num_batched_tokens=512),
        replace(PLAN, kv_type="fp8"),
        replace(PLAN, speculation=Speculation(kind="ngram", tokens=16)),
    ],
)
def test_each_configuration_has_its_own(other: Any, shelf: Shelf) -> None:
    whole, begun = peak(12_000, is_whole=True), peak(9000, plan=other)
    assert shelf.keep(begun, whole, begun) == (begun, whole)


def test_two_machines_with_like_cards_leave_each_other_theirs(shelf: Shelf) -> None:
    (share,) = PLAN.placement.shares
    there = replace(share, gpu=replace(share.gpu, id="GPU-of-another-machine"))
    theirs = replace(
        peak(11_000, is_whole=True, plan=replace(PLAN, placement=replace(PLAN.placement, shares=(there,)))),
        cards=(replace(CARD, device="GPU-of-another-machine"),),
    )
    ours = peak(12_000, is_whole=True)
    assert shelf.keep(theirs, ours, theirs) == (theirs, ours)


def test_the_last_configurations_are_kept(shelf: Shelf) -> None:
    many = [peak(9000, plan=replace(PLAN, parallel=count)) for count in range(1, KEPT_MAX + 3)]
    assert shelf.keep(*many) == tuple(reversed(many))[:KEPT_MAX]


def test_an_engine_that_ran_out_of_memory_needs_its_work_to_be_seen_again(shelf: Shelf) -> None:
    whole = peak(12_000, is_whole=True)
    other = peak(11_000, is_whole=True, plan=replace(PLAN, parallel=8))
    shelf.keep(other, whole)
    assert shelf.store.doubt_peak(key(), replace(PLAN, context=4096))
    assert shelf.store.peaks(key(), GPUS) == (replace(whole, is_whole=False), other)
    assert shelf.keep(peak(11_500, is_whole=True)) == (replace(whole, is_whole=True), other)
    assert shelf.store.doubt_peak(key("b2"), PLAN)
    assert not shelf.path.with_name(f"{key('b2').id}.peak").exists()


def test_nobody_waits_for_a_lock(shelf: Shelf) -> None:
    lock = shelf.path.with_suffix(".lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not shelf.store.keep_peak(key(), PEAK, GPUS)
        assert not shelf.store.doubt_peak(key(), PLAN)
    assert shelf.keep(PEAK) == (PEAK,)


def changed(change: Callable[[dict[str, Any]], object], peak: MemoryPeak = PEAK) -> bytes:
    document = json.loads(json.dumps(asdict(peak)))
    change(document)
    return json.dumps({"peaks": [document]}).encode()


HUGE = int("1" * 401)
BROKEN = [
    b"",
    b"{",
    b"\xff",
    b"[]",
    b"{}",
    b'{"peaks": {}}',
    b'{"peaks": [1]}',
    json.dumps(asdict(PEAK)).encode(),
    changed(lambda found: found.pop("cards")),
    changed(lambda found: found.update(more=1)),
    changed(lambda found: found.update(cards=[])),
    changed(lambda found: found.update(cards=[]), MemoryPeak(plan=best(CPU, "smollm2-135m"), cards=())),
    changed(lambda found: found["cards"][0].update(device="GPU-other")),
    changed(lambda found: found["cards"][0].update(peak_mib=-1)),
    changed(lambda found: found["cards"][0].update(peak_mib=19_999)),
    changed(lambda found: found["cards"][0].update(peak_mib=HUGE)),
    changed(lambda found: found["cards"][0].update(peak_mib=HUGE, ready_mib=HUGE, kv_mib=HUGE)),
    changed(lambda found: found["cards"][0].update(kv_mib=float("nan"))),
    changed(lambda found: found["cards"][0].update(peak_mib=float("inf"))),
    changed(lambda found: found["cards"][0].update(ready_mib="many")),
    changed(lambda found: found["plan"].update(engine="another")),
]


@pytest.mark.parametrize("data", BROKEN)
def test_what_cannot_be_read_is_said_and_set_aside_by_the_next_that_is_kept(data: bytes, shelf: Shelf) -> None:
    shelf.path.write_bytes(data)
    assert shelf.store.peaks(key(), GPUS) == ()
    assert shelf.path.read_bytes() == data
    assert len(shelf.warnings) == 1
    assert shelf.keep(PEAK) == (PEAK,)
    assert shelf.path.with_suffix(".peak-corrupt").read_bytes() == data


@pytest.mark.parametrize("peak_mib", [24_565, 10**9])
def test_more_than_the_card_has_is_not_believed_and_goes_with_the_next(peak_mib: int, shelf: Shelf) -> None:
    shelf.path.write_bytes(changed(lambda found: found["cards"][0].update(peak_mib=peak_mib)))
    assert shelf.store.peaks(key(), GPUS) == ()
    assert f"not believed, not used: {peak_mib:,} MiB of {CARD.device}, which has 24,564" in shelf.warnings[0]
    assert shelf.keep(PEAK) == (PEAK,)


def test_a_folder_in_its_place_is_no_reason_to_fail_a_start(shelf: Shelf) -> None:
    shelf.path.mkdir()
    assert shelf.store.peaks(key(), GPUS) == ()
    assert "Is a directory" in shelf.warnings[0]
    with pytest.raises(VolumeError):
        shelf.keep(PEAK)


@pytest.mark.parametrize("has_profile", [True, False])
def test_it_is_forgotten_with_its_profile_and_without_one(has_profile: bool, shelf: Shelf) -> None:
    shelf.keep(PEAK)
    if has_profile:
        shelf.store.save(profile())
    assert shelf.store.forget(key().id[:6]).id == key().id
    assert shelf.store.peaks(key(), GPUS) == ()
    with pytest.raises(ConfigError):
        shelf.store.forget(key().id)
