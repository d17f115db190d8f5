"""Plans for RTX 2080 Ti of 22 GB with Qwen3.6-27B-AWQ, held to arithmetic that is done here and to published runs."""

from __future__ import annotations

import re

import pytest

from appliance.plan import Plan
from tests.unit.engines.vllm.planning.vllm_spaces import TURINGS, launch, reason, space

MODEL, FOUR = "qwen3.6-27b-awq", "4x2080ti-22g"
CARD_MIB = 22528
# Two such cards, vLLM 0.21 with a plugin, 262,144 tokens, MTP 2, utilization 0.96: it stayed up with so much in use.
PUBLISHED_MIB = 21197
CONTEXT_MIB = 68 * 3.3 + 192 + 384  # CUDA for 68 multiprocessors, PyTorch, NCCL
# Weights that a token reads: all but the input's embedding (2,425 MiB of the 24,651 in the files).
READ_MIB = 24651 - 2425
GB_S = 616 * 0.8
# Sixteen layers of full attention: K and V of 4 heads of 256, two bytes each.
TOKEN_BYTES = 16 * 2 * 4 * 256 * 2


def plan(machine: str, **flags: str) -> Plan:
    return space(machine, MODEL, None, **flags).predicted


@pytest.mark.parametrize(("machine", "cards"), [(TURINGS, 2), (FOUR, 4)])
def test_the_speed_without_drafts(machine: str, cards: int) -> None:
    """Each card streams its share; then 64 layers of 12 us, two all-reduces a layer over NVLink, 0.8 ms of the host."""
    found = plan(machine)
    fixed_ms = 64 * 0.012 + 2 * 64 * 0.012 + 0.8
    cache_ms = 640 * TOKEN_BYTES / cards / GB_S / 1e6
    by_hand = 1000 / (READ_MIB / cards * 2**20 / GB_S / 1e6 + cache_ms + fixed_ms)
    assert found.speed is not None
    assert found.speed.decode_tokens_per_s == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("flags", [{}, {"speculation": "mtp", "parallel": "1", "mmproj": "off"}])
@pytest.mark.parametrize("machine", [TURINGS, FOUR])
def test_no_card_is_fuller_than_the_published_run(machine: str, flags: dict[str, str]) -> None:
    found = plan(machine, **flags)
    for share in found.placement.shares:
        in_use = share.memory.total + CONTEXT_MIB
        assert PUBLISHED_MIB - 25 <= in_use <= PUBLISHED_MIB + 3  # one step of the utilization is 23 MiB
        assert share.gpu.free_mib == pytest.approx(PUBLISHED_MIB - CONTEXT_MIB, abs=3)
    assert launch(found).utilization == pytest.approx((PUBLISHED_MIB - CONTEXT_MIB) / CARD_MIB, abs=0.001)


def test_a_reserve_that_was_asked_for_is_the_whole() -> None:
    fuller = plan(TURINGS, reserve_mib="737")
    assert fuller.context > plan(TURINGS).context
    assert reason(fuller, "reserve") == "737 asked for"


def test_newer_cards_keep_their_reserve() -> None:
    assert "fragments" not in reason(space("1x4090", "qwen3-8b-fp8").best, "reserve")
    assert "fragments, as the fullest published run left" in reason(plan(TURINGS), "reserve")


def test_each_further_gib() -> None:
    """A GiB is 32,768 tokens of 32 KiB a rank; in whole blocks of 784, each of sixteen layers in full, 41 blocks."""
    found = plan(TURINGS)
    told = re.search(r"each further GiB a card: ([\d,]+) tokens more", reason(found, "context"))
    assert told is not None
    tokens = int(told[1].replace(",", ""))
    assert tokens == 41 * 784
    assert 0.95 * 2**30 <= tokens * TOKEN_BYTES / 2 <= 2**30
    wider = plan(TURINGS, reserve_mib=str(1329 - 1024))
    assert wider.context - found.context == pytest.approx(tokens, abs=784 + 256)
    assert "further GiB" not in reason(plan(FOUR), "context")
