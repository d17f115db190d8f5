"""chips.yaml against what the backends in the image vllm-cu130 say of each chip (introspect.py, without a GPU)."""

from __future__ import annotations

import pytest

from appliance.engines.vllm.planning.model.chips import chip_of
from appliance.image_facts import AttentionBackend
from tests.golden.vllm_plans import engine_facts

FACTS = engine_facts()
SMS = ("75", "80", "86", "87", "89", "90", "100", "103", "110", "120", "121")
KINDS = pytest.mark.parametrize("is_mla", [False, True], ids=["", "latent"])


def own(name: str) -> AttentionBackend:
    (found,) = [each for each in FACTS.attention if each.name == name]
    assert found.sms is not None
    assert found.kv_types is not None
    return found


@KINDS
@pytest.mark.parametrize("sm", SMS)
def test_each_backend_of_a_chip_says_that_it_runs_there(sm: str, is_mla: bool) -> None:
    backends = [own(name) for name in chip_of(sm, is_mla=is_mla).backends]
    assert [each.name for each in backends if sm not in (each.sms or ())] == []
    assert {each.is_mla for each in backends} == {is_mla}


@KINDS
@pytest.mark.parametrize("sm", SMS)
def test_each_kv_type_is_one_that_its_backend_takes(sm: str, is_mla: bool) -> None:
    chip = chip_of(sm, is_mla=is_mla)
    assert [(kv, name) for kv, name in chip.kv_types.items() if kv not in (own(name).kv_types or ())] == []
    assert set(chip.kv_types.values()) <= set(chip.backends)


@pytest.mark.parametrize("sm", SMS)
def test_what_is_passed_over_on_a_chip_says_so_itself(sm: str) -> None:
    assert [name for name in chip_of(sm).passed_over if sm in (own(name).sms or ())] == []
