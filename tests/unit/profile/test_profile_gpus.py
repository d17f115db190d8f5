"""Profiles of plans with GPUs, and documents with missing parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from appliance.plan import Allocated, Plan
from appliance.profile.record import dump_profile, parse_profile
from tests.builders import profile, some
from tests.golden.plans import CASES, space

SPLIT = next(case for case in CASES if (case.machine, case.model) == ("2x4090", "gpt-oss-120b"))


@cache
def plans() -> tuple[Plan, ...]:
    return tuple(space(SPLIT).all())


@pytest.mark.thorough
def test_a_placement_comes_back_as_it_was() -> None:
    first, *others = plans()[:3]
    allocated = Allocated(model=60000.0, kv=4644.0, recurrent=1.0, devices=(("CUDA0", 22877.0), ("CUDA1", 22117.0)))
    found = replace(profile(), plan=first, plans=(first, *others), allocated=allocated)
    assert parse_profile(dump_profile(found)) == found
    assert found.prediction_error == pytest.approx(first.predicted_mib / 64645.0 - 1)


def places(found: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each named value in a document."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield (*path, name)
            yield from places(value, (*path, name))
    if isinstance(found, list):
        for number, value in enumerate(found):
            yield from places(value, (*path, number))


@pytest.mark.thorough
def test_a_document_that_lacks_anything_anywhere_is_no_profile() -> None:
    first, other, *_ = plans()
    text = dump_profile(replace(profile(), plan=first, plans=(first, other)))
    everywhere = list(places(json.loads(text)))
    for *path, last in some(everywhere):
        document = json.loads(text)
        place = document
        for name in path:
            place = place[name]
        del place[last]
        with pytest.raises(ValueError, match=rf"{last}|does not match"):
            parse_profile(json.dumps(document))
    assert {
        "noise_factor",
        "shares",
        "held_back_mib",
        "conditions",
        "interval_s",
        "is_long",
        "other_modes",
        "parts",
    } <= {last for *_, last in everywhere}
