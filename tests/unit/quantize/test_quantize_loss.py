"""The loss from the means of chunks."""

from __future__ import annotations

import math

import pytest

from appliance.errors import EngineNotReadyError
from appliance.quantize.loss import compare


def test_it_is_the_mean_of_the_differences_with_its_standard_error() -> None:
    loss = compare([3.0, 2.0, 4.0, 3.0], [3.1, 2.1, 4.3, 3.1])
    assert loss.difference == pytest.approx(0.15)
    assert loss.standard_error == pytest.approx(0.05)  # sd of 0.1, 0.1, 0.3, 0.1 is 0.1, over the root of 4
    assert loss.tokens == 4 * 256
    assert loss.origin_perplexity == pytest.approx(math.exp(3.0))
    assert loss.perplexity == pytest.approx(math.exp(3.15))
    assert loss.describe() == "perplexity +16.18 % ± 5.13 % over 1,024 tokens"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_file_without_probabilities_is_not_finite(broken: float) -> None:
    assert not compare([3.0, 2.0], [3.0, broken]).is_finite


def test_an_original_without_probabilities_gives_no_figure() -> None:
    with pytest.raises(EngineNotReadyError, match="original"):
        compare([3.0, math.nan], [3.0, 3.0])
