"""replays.json: results of replaying recorded expert routing. `plan --explain` estimates an expert cache from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from appliance.documents import load, read
from appliance.moe.outlook import Replay, Steps

PATH = Path(__file__).with_name("replays.json")


@cache
def load_replays() -> tuple[Replay, ...]:
    """Return the replays. The file is read on first use, because only `plan --explain` needs it."""
    return tuple(read(Replay, each, by_slots=_by_slots) for each in load(PATH.read_bytes())["replays"])


def _by_slots(document: Mapping[str, list[list[list[int]]]]) -> Mapping[int, tuple[Steps, ...]]:
    """Return the steps by number of slots. JSON keys are texts, so they are converted to numbers."""
    return {
        int(slots): tuple(tuple((hits, copies, count) for hits, copies, count in policy) for policy in policies)
        for slots, policies in document.items()
    }
