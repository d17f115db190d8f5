"""Choice among several files: small cases, and golden tables of described machines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from appliance.selection.rank import (
    FLOOR_TOKENS_PER_S,
    GOOD_ENOUGH,
    Candidate,
    Choice,
    Forecast,
    Wants,
    choose,
    prefer,
    usual_context,
)
from appliance.selection.table import as_document, as_text
from tests.builders import some
from tests.golden.choices import CASES, HERE, Case, text

GB = 10**9


def candidate(name: str, billions: float = 8.0, **given: Any) -> Candidate:
    return Candidate(
        **{
            "name": name, "tier": "balanced", "quantization": "Q4_K_M", "parameters_b": billions, "active_b": billions,
            "bytes": int(billions * 0.6 * GB), "missing_bytes": int(billions * 0.6 * GB), **given,
        }
    )  # fmt: skip


def forecast(decode: float | None = 50.0, **given: Any) -> Forecast:
    return Forecast(
        **{
            "where": "all on the GPU", "context": 32768, "is_on_gpus": True, "decode_tokens_per_s": decode,
            "prefill_tokens_per_s": 1000.0, **given,
        }
    )  # fmt: skip


def chosen(choice: Choice) -> str | None:
    return choice.chosen.candidate.name if choice.chosen else None


def among(*pairs: tuple[Candidate, Forecast | str], **wants: Any) -> Choice:
    forecasts = {each.name: found for each, found in pairs}
    return choose([each for each, _ in pairs], forecasts, Wants(**{"context": 16384, **wants}))


def verdicts(choice: Choice) -> list[str]:
    return [row.verdict for row in choice.rows]


@pytest.mark.thorough
@pytest.mark.parametrize("case", some(CASES), ids=lambda case: case.name)
def test_the_choice_on_a_described_machine(case: Case) -> None:
    assert text(case) == (HERE / f"{case.name}.txt").read_text()


def test_every_table_is_of_a_case() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == {case.name for case in CASES}


def test_the_largest_that_is_useful_wins() -> None:
    choice = among(
        (candidate("small", 4), forecast(90)),
        (candidate("middle", 8), forecast(45)),
        (candidate("slow", 32), forecast(FLOOR_TOKENS_PER_S - 0.1)),
        (candidate("huge", 70), "needs 40 GB"),
    )
    assert (chosen(choice), verdicts(choice)) == ("middle", ["fits", "chosen", "slow", "does not fit"])


def test_what_cannot_be_read_is_passed_over() -> None:
    broken = candidate("broken", 32, missing_bytes=0, problem="no GGUF file")
    choice = among((candidate("small", 4), forecast(90)), (broken, ""))
    assert (chosen(choice), verdicts(choice)) == ("small", ["chosen", "damaged"])
    assert choice.rows[1].reason == "no GGUF file"


def test_an_earlier_choice_stays_while_it_fits_and_the_better_one_is_named() -> None:
    small, large = candidate("small", 4, missing_bytes=0), candidate("large", 14)
    choice = among((small, forecast(90)), (large, forecast(50)))
    assert chosen(choice) == "large"
    kept = prefer(choice, "small")
    assert (chosen(kept), verdicts(kept), kept.better) == ("small", ["chosen", "fits"], kept.rows[1])
    assert kept.rows[0].reason == "an earlier start chose it; large would be better"
    for name in ("large", "none of these"):
        assert prefer(choice, name) == choice
    for given in ({"missing_bytes": 5}, {"problem": "damaged"}):
        again = among((candidate("small", 4, **given), forecast(90)), (large, forecast(50)))
        assert prefer(again, "small") == again
    slow = among((small, forecast(FLOOR_TOKENS_PER_S / 2)), (large, forecast(50)))
    assert prefer(slow, "small") == slow


def test_speed_counts_until_it_is_fluent() -> None:
    assert chosen(among((candidate("small", 8), forecast(50)), (candidate("large", 14), forecast(8.5)))) == "small"
    assert chosen(among((candidate("small", 8), forecast(500)), (candidate("large", 14), forecast(15)))) == "large"


def test_a_mixture_is_worth_less_than_a_dense_model_of_its_size() -> None:
    mixture = candidate("mixture", 30, active_b=3)
    assert mixture.effective_b == pytest.approx(9.49, abs=0.01)
    assert chosen(among((mixture, forecast(200)), (candidate("dense", 14), forecast(40)))) == "dense"
    assert chosen(among((mixture, forecast(200)), (candidate("dense", 8), forecast(40)))) == "mixture"


def test_a_newer_generation_is_worth_more() -> None:
    newer = candidate("newer", 9, generation=3.5 / 3)
    assert chosen(among((newer, forecast()), (candidate("older", 14), forecast()))) == "newer"
    assert chosen(among((newer, forecast()), (candidate("older", 32), forecast()))) == "older"


def test_the_higher_tier_of_the_same_model_only_where_all_lies_on_gpus() -> None:
    low, high = candidate("q4"), candidate("q8", tier="quality")
    assert chosen(among((low, forecast()), (high, forecast()))) == "q8"
    on_host = forecast(is_on_gpus=False)
    assert chosen(among((low, on_host), (high, on_host))) == "q4"
    assert chosen(among((candidate("q2", tier="compact"), forecast()), (low, forecast()))) == "q4"


def test_the_context_wanted_is_kept() -> None:
    short = forecast(context=8192)
    choice = among((candidate("large", 32), short), (candidate("small", 4), forecast()))
    assert (chosen(choice), choice.rows[0].verdict) == ("small", "short context")
    assert "16,384" in choice.rows[0].reason
    assert chosen(among((candidate("large", 32), short), (candidate("small", 4), forecast()), context=8192)) == "large"


def test_what_is_here_and_good_enough_goes_before_a_better_one() -> None:
    best, here = candidate("best", 14), candidate("here", 8, missing_bytes=0)
    choice = among((best, forecast()), (here, forecast()))
    assert GOOD_ENOUGH < (8 / 14) ** 0.5
    assert (chosen(choice), choice.better and choice.better.candidate.name) == ("here", "best")
    assert choice.chosen
    assert "best would be better" in choice.chosen.reason
    small = candidate("here", 4, missing_bytes=0)
    choice = among((best, forecast()), (small, forecast()))
    assert (chosen(choice), choice.better) == ("best", None)


def test_room_on_the_volume_is_part_of_it() -> None:
    large, small = candidate("large", 32), candidate("small", 4)
    choice = among((large, forecast()), (small, forecast()), free_bytes=10 * GB)
    assert (chosen(choice), choice.rows[0].verdict) == ("small", "no room")
    begun = replace(large, missing_bytes=5 * GB)  # most of it came in an earlier run
    assert chosen(among((begun, forecast()), (small, forecast()), free_bytes=10 * GB)) == "large"


def test_offline_only_what_is_here() -> None:
    here = candidate("here", 4, missing_bytes=0)
    choice = among((candidate("away", 8), forecast()), (here, forecast()), is_offline=True)
    assert (chosen(choice), choice.rows[0].verdict) == ("here", "offline")
    assert chosen(among((candidate("away", 8), forecast()), is_offline=True)) is None


def test_a_tier_that_is_asked_for_rules_out_the_others() -> None:
    low, high = candidate("q4"), candidate("q8", tier="quality")
    choice = among((low, forecast()), (high, forecast()), tier="balanced")
    assert (chosen(choice), verdicts(choice)) == ("q4", ["chosen", "other tier"])


def test_where_nothing_is_useful_the_fastest_with_the_context_is_served() -> None:
    slow, slower = (candidate("slow", 4), forecast(5.0)), (candidate("slower", 8), forecast(3.0))
    short = (candidate("short", 2), forecast(40.0, context=4096))
    assert chosen(among(slower, slow, short)) == "slow"
    assert chosen(among(short, (candidate("none"), "needs more"))) == "short"


def test_nothing_fits_and_nothing_is_known() -> None:
    assert chosen(among((candidate("a"), "needs 1 MiB"), (candidate("b"), "needs 2 MiB"))) is None
    unknown = [candidate("a"), candidate("b")]
    assert chosen(choose(unknown, {}, Wants(context=8192), default="b")) == "b"
    assert chosen(choose(unknown, {}, Wants(context=8192))) == "a"
    assert chosen(choose([], {}, Wants(context=8192))) is None


def test_an_engine_that_tells_no_speed_is_taken_at_its_word() -> None:
    quiet = forecast(None, prefill_tokens_per_s=None)
    choice = among((candidate("large", 14), quiet), (candidate("small", 4), quiet))
    assert chosen(choice) == "large"
    assert "?" in as_text(choice)


def test_the_usual_context() -> None:
    assert [usual_context(mode, 2**20) for mode in ("speed", "balanced", "context")] == [8192, 16384, 32768]
    assert usual_context("context", 4096) == 4096


def test_the_table_for_scripts() -> None:
    choice = among((candidate("a", 4, missing_bytes=0), forecast()), (candidate("b"), "needs 9 GB"))
    document = json.loads(json.dumps(as_document(choice)))
    assert (document["chosen"], document["better"]) == ("a", None)
    first, second = document["files"]
    assert (first["verdict"], first["missing_bytes"], first["context"]) == ("chosen", 0, 32768)
    assert (second["verdict"], second["reason"], second["where"]) == ("does not fit", "needs 9 GB", None)
    assert as_text(choice).splitlines()[1].startswith("*+  a")
