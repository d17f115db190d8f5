"""Profiles of plans with GPUs, and those that were written before plans had any."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from appliance.tune.search import CHAT, Measurement, next_plan, plan_of
from profiles import profile

from appliance.engines.llama_server import Allocated
from appliance.plan import Placement, as_measured, nearest
from appliance.profile.record import dump_profile, parse_profile
from tests.golden.plans import CASES, Case, plans

SPLIT = next(case for case in CASES if (case.machine, case.model) == ("2x4090", "gpt-oss-120b"))
OLD = {
    "plan": ("checkpoints", "placement", "speed"),
    "allocated": ("recurrent", "mapped", "repacked", "devices"),
}


def test_a_placement_comes_back_as_it_was() -> None:
    plan = plans(SPLIT)[0]
    allocated = Allocated(model=60000.0, kv=4644.0, recurrent=1.0, devices=(("CUDA0", 22877.0), ("CUDA1", 22117.0)))
    found = replace(profile(), plan=plan, allocated=allocated)
    assert parse_profile(dump_profile(found)) == found
    assert found.prediction_error == pytest.approx(plan.predicted_mib / 64645.0 - 1)


def test_a_record_from_before_there_were_gpus_is_read() -> None:
    document = json.loads(dump_profile(profile()))
    for part, names in OLD.items():
        for name in names:
            del document[part][name]
    for name in ("state", "checkpoints", "repacked", "mapped_twice"):
        del document["plan"]["memory"][name]
    for measurement in document["measurements"]:
        del measurement["variant"]
        for name in OLD["allocated"] if measurement["allocated"] else ():
            del measurement["allocated"][name]
    found = parse_profile(json.dumps(document))
    assert found.plan.placement == Placement()
    assert found.plan.threads == profile().plan.threads


def test_a_share_without_its_memory_is_no_record() -> None:
    document = json.loads(dump_profile(replace(profile(), plan=plans(SPLIT)[0])))
    del document["plan"]["placement"]["shares"][0]["memory"]
    with pytest.raises(ValueError, match="profile lacks something"):
        parse_profile(json.dumps(document))


def test_a_start_takes_the_measured_placement_if_it_is_still_there() -> None:
    found = plans(SPLIT)
    other = next(p for p in found if p.placement.cpu_expert_layers != found[0].placement.cpu_expert_layers)
    assert nearest(found, other) is other
    assert as_measured(nearest(found, other), other).placement == other.placement
    gone = replace(other, placement=replace(other.placement, cpu_expert_layers=99))
    assert nearest(found, gone) is found[0]


@pytest.mark.parametrize("case", [SPLIT, CASES[0]], ids=lambda case: case.name)
def test_every_variant_is_measured_once_and_found_again(case: Case) -> None:
    found = plans(case)
    measured: list[Measurement] = []
    while (plan := next_plan(found, measured, CHAT)) is not None:
        measured.append(Measurement(threads=plan.threads, ubatch=plan.ubatch, variant=plan.variant, error="no"))
        assert plan_of(found, measured[-1]) is plan
        assert len(measured) <= len(found)
    seen = {(m.threads, m.ubatch, m.variant) for m in measured}
    assert len(seen) == len(measured)
    assert {p.variant for p in found if (p.threads, p.ubatch) == (found[0].threads, found[0].ubatch)} <= {
        variant for _, _, variant in seen
    }
