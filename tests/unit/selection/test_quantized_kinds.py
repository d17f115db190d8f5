"""Which type an unquantized model is quantized to, from forecasts alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from appliance.selection.kinds import choose_kind
from appliance.selection.rank import Forecast

WANTED = 16384
NO_FIT = "needs 9 MiB, and 5 MiB are usable"


def at(decode: float | None, context: int = WANTED) -> Forecast:
    return Forecast(
        where="CPU", context=context, is_on_gpus=False, decode_tokens_per_s=decode, prefill_tokens_per_s=100.0
    )


def types(*found: Forecast | str) -> Mapping[str, Forecast | str]:
    return dict(zip(("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"), found, strict=True))


ROWS: Mapping[str, tuple[Mapping[str, Forecast | str], Forecast | str, str | None]] = {
    "the largest is fast enough": (types(at(30), at(40), at(45), at(50)), at(16), "Q8_0"),
    "only the smaller ones are fluent": (types(at(9), at(12), at(14.9), at(15)), at(5), "Q4_K_M"),
    "none is fluent: the fastest": (types(at(4), at(5), at(6), at(7)), at(2), "Q4_K_M"),
    "nothing to gain": (types(at(20), at(20), at(20), at(20)), at(19), None),
    "a gain just below the factor": (types(at(24.9), at(24.9), at(24.9), at(24.9)), at(20), None),
    "a gain of the factor": (types(at(25), at(25), at(25), at(25)), at(20), "Q8_0"),
    "the largest has no whole context": (types(at(30, 4096), at(40), at(45), at(50)), at(16, 2048), "Q6_K"),
    "the original lacks context, and a slower one has it": (types(at(16), at(17), at(18), at(19)), at(16, 512), "Q8_0"),
    "none has the whole context: the longest": (
        types(at(30, 1024), at(30, 2048), at(30, 4096), at(30, 4096)),
        NO_FIT,
        "Q5_K_M",
    ),
    "the original does not fit": (types(NO_FIT, at(20), at(25), at(30)), NO_FIT, "Q6_K"),
    "no type fits either": (types(NO_FIT, NO_FIT, NO_FIT, NO_FIT), NO_FIT, None),
    "speeds are unknown, and the original fits": (types(at(None), at(None), at(None), at(None)), at(None), None),
    "speeds are unknown, and it does not": (types(at(None), at(None), at(None), at(None)), NO_FIT, "Q8_0"),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_type(name: str) -> None:
    forecasts, original, expected = ROWS[name]
    kind, reason = choose_kind(forecasts, original, WANTED)
    assert kind == expected, reason
    assert reason


def test_the_reason_has_the_figures() -> None:
    _, reason = choose_kind(types(at(30), at(40), at(45), at(50)), at(16), WANTED)
    assert reason == "the largest type with 16,384 tokens and 30.0 tok/s instead of 16.0"
    _, reason = choose_kind(types(at(30), at(40), at(45), at(50)), NO_FIT, WANTED)
    assert reason == f"the largest type with 16,384 tokens and 30.0 tok/s; the original {NO_FIT}"
    _, reason = choose_kind(types(at(20), at(20), at(20), at(20)), at(19), WANTED)
    assert reason == "no smaller type has 16,384 tokens and decodes 1.25 times as fast"
