"""What draft layers are expected to gain: the prediction is held to results that others published."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from appliance.engines.vllm.planning.estimate import Estimate
from appliance.engines.vllm.planning.speculation import MTP_TOKENS, MTP_TOKENS_MANY, draft_share, gain_of
from appliance.errors import ConfigError
from appliance.plan import ExpectedGain, SpeedupModel, StepCost, expected_gain
from appliance.plan.parts.drafts import MTP_ACCEPTED
from appliance.settings import resolve_settings
from appliance.tune.figures.acceptance import NOISE, SpeculationResult, next_tokens
from tests.golden.vllm_plans import arguments
from tests.shapes.folders import folder_model
from tests.unit.engines.vllm.planning.vllm_spaces import SERVER, TURINGS, reason, space

FOUR = "4x2080ti-22g"
# Two RTX 2080 Ti of 22 GB with NVLink, a fork of vLLM 0.21, tok/s without and with so many draft tokens.
QWEN_GPTQ, GEMMA_GPTQ = 43.59, 31.65  # docs/mtp-task-sensitivity.md of vLLM-2080Ti-Definitive: 4,096 + 1,024 tokens
PUBLISHED = (
    *((QWEN_GPTQ, tokens, found) for tokens, found in enumerate((42.94, 49.11, 60.62, 60.77, 59.55), 1)),
    *((GEMMA_GPTQ, tokens, found) for tokens, found in enumerate((21.47, 28.92, 33.71, 36.64, 39.06, 40.26, 41.19), 1)),
    (QWEN_GPTQ, 3, 97.79),  # the same repository: 4,096 + 128 tokens
    (31.5, 3, 68.0),  # AWQ, 4,096 + 128 tokens, without drafts "31 to 32"
)
# tok/s of Qwen3.6-27B-AWQ on such cards with 2 or 3 draft tokens: by three people, context up to 32,768.
AWQ = (48.9, 52.0, 68.0, 77.0, 90.0)


def estimate(machine: str, **flags: str) -> Estimate:
    return space(machine, "qwen3.6-27b-awq", None, **flags)._best


def gain(machine: str, **flags: str) -> ExpectedGain:
    found = gain_of(estimate(machine, **flags), "mtp")
    assert found is not None
    return found


def test_the_middle_is_the_law_by_hand() -> None:
    """A draft pass reads the draft layer (810 MiB) and the output (2,425 MiB), a step 22,226 MiB: b is 0.1456."""
    assert draft_share(estimate(TURINGS)) == pytest.approx((810 + 2425) / 22226, abs=1e-4)
    by_hand = (1 + 0.81 + 0.57 + 0.38) / (1 + 0.4 + 3 * 0.1456)
    assert gain(TURINGS).auto == pytest.approx(by_hand, abs=2e-3)


def test_four_of_five_published_results_are_within_the_limits() -> None:
    """The limits were chosen from these results, so this holds the arithmetic and no forecast."""
    inside = []
    for base, tokens, found in PUBLISHED:
        limits = gain(TURINGS, speculation="mtp", draft_tokens=str(tokens))
        inside.append(limits.low <= found / base <= limits.high)
    assert sum(inside) / len(inside) >= 0.8, inside


def test_the_interval_of_the_plan_has_the_published_speeds() -> None:
    words = reason(space(TURINGS, "qwen3.6-27b-awq").best, "speculation")
    shown = re.search(r"(\d+) tok/s \((\d+) to (\d+)\) expected with 3 draft tokens, stable (\d+), fast (\d+)", words)
    assert shown is not None, words
    middle, low, high, stable, fast = map(int, shown.groups())
    assert all(low <= speed <= high for speed in AWQ)
    assert low < stable < middle < fast < high


def test_the_published_rule_is_within_noise_of_the_laws_best() -> None:
    for machine, tokens in ((TURINGS, MTP_TOKENS), (FOUR, MTP_TOKENS_MANY)):
        law = SpeedupModel(a=0.4, b=draft_share(estimate(machine)), acceptance=MTP_ACCEPTED["auto"])
        best = max(law.speedup(each) for each in range(1, 9))
        assert gain(machine).tokens == tokens
        assert law.speedup(tokens) > best * (1 - NOISE)


def test_limits_order_and_costs() -> None:
    costs = [StepCost(a=a, b=0.2) for a in (0.0, 0.4, 0.8)]
    for tokens in range(1, 9):
        found = expected_gain(tokens, cheap=costs[0], cost=costs[1], dear=costs[2])
        assert found.low < found.stable < found.auto < found.fast < found.high
        speeds = found.describe_speeds(100.0, 0.0)
        assert f"({100 * found.low:.0f} to {100 * found.high:.0f})" in speeds
    assert math.isclose(SpeedupModel(a=0.5, b=0.0, acceptance=(1.0,)).speedup(1), 2 / 1.5)


def test_nothing_is_expected_without_results() -> None:
    assert all(offer.gain is None for offer in space("cpu-16g", "smollm2-135m").offers())
    kinds = {offer.kind: offer.gain for offer in space(SERVER, "qwen3.6-27b-awq").offers()}
    assert kinds["ngram"] is None
    assert kinds["mtp"] is not None


@pytest.mark.parametrize("kind", ["mtp", "ngram"])
def test_the_users_number_is_served(kind: str) -> None:
    asked = space(TURINGS, "qwen3.6-27b-awq", speculation=kind, draft_tokens="5", parallel="1")
    config = json.loads(arguments(asked.predicted)[arguments(asked.predicted).index("--speculative-config") + 1])
    assert (config["method"], config["num_speculative_tokens"]) == (kind, 5)
    assert [offer.tokens for offer in asked.offers()] == [5]
    assert "up to 5 tokens" in reason(asked.predicted, "speculation")


def test_draft_layers_divide_the_number() -> None:
    model = folder_model("qwen3.6-27b-awq")
    config = {**model.config, "text_config": {**model.config["text_config"], "mtp_num_hidden_layers": 2}}
    two = replace(model, config=config, layers=model.layers + 1)
    assert space(TURINGS, two, speculation="mtp", draft_tokens="4").offers()
    with pytest.raises(ConfigError, match="2 draft layers") as refused:
        space(TURINGS, two, speculation="mtp", draft_tokens="3").offers()
    assert refused.value.hint == "use --draft-tokens 2"


def test_a_number_without_a_kind_is_10() -> None:
    for asked, words in (("auto", "chooses the number by measuring"), ("off", "nothing is drafted")):
        with pytest.raises(ConfigError) as refused:
            space(TURINGS, "qwen3.6-27b-awq", speculation=asked, draft_tokens="3").offers()
        assert words in refused.value.message
        assert "3 (flag --draft-tokens)" in refused.value.message
        assert "--speculation: draft, mtp, ngram" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="draft_tokens"):
        resolve_settings({"draft_tokens": "0"}, {})


def test_only_the_users_number_is_measured() -> None:
    assert next_tokens(10.0, [], (5,)) == 5
    found = SpeculationResult(tokens=5, ms=7.0, drafted=2.0, accepted=1.0)
    assert next_tokens(10.0, [found], (5,)) is None
