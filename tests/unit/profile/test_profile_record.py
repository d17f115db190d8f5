"""Content of a profile, and the parts of its key."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from appliance.plan import Allocated
from appliance.profile import dump_profile, make_key, parse_profile
from appliance.settings import resolve_settings
from tests.builders import DIGEST, IMAGE, key, machine, profile


@pytest.mark.parametrize(
    ("name", "value"),
    [("decode_ms", 0.0), ("decode_ms", -1.0), ("decode_ms", math.nan), ("prefill_ms", math.inf), ("depth", -1)],
)
def test_figures_that_no_engine_has_are_refused(name: str, value: float) -> None:
    document = json.loads(dump_profile(profile()))
    document["measurements"][0]["points"][0][name] = value
    with pytest.raises(ValueError, match=r"Profile.measurements\[0\].points\[0\] cannot be: Point\("):
        parse_profile(json.dumps(document))


def test_a_workload_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="names no workload of chat, agent, document"):
        parse_profile(dump_profile(replace(profile(), workload="dance")))


def test_the_error_of_a_prediction_is_that_of_the_plan_whose_memory_was_read() -> None:
    """Later estimates for the same plan do not change the error."""
    made = profile()
    plain = made.prediction_error
    assert plain is not None
    grown = replace(made.plan, memory=replace(made.plan.memory, weights=made.plan.memory.weights + 5000))
    assert replace(made, plan=grown).prediction_error == plain


def test_an_engine_that_tells_of_its_cache_alone_is_compared_by_that() -> None:
    made = profile()
    told = Allocated(kv=made.plan.predicted_kv_mib / 1.1, kv_tokens=4096)
    assert replace(made, allocated=told).prediction_error == pytest.approx(0.1)


def test_another_draft_model_is_another_key() -> None:
    made = key(speculation="draft")
    assert made.parts.get("draft") is None
    digests = (None, DIGEST, replace(DIGEST, size=DIGEST.size + 1))
    keys = {make_key(resolve_settings({}, {}), IMAGE, machine(), DIGEST, each).id for each in digests}
    assert len(keys) == 3
