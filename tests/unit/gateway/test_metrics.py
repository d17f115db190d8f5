"""What /metrics has, held against the board that shows it and the page that lists it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.console.progress import Phase, Progress
from appliance.engines.llama.api.routes import parse_counts
from appliance.engines.metric_aliases import METRIC_ALIASES
from appliance.gateway.clients.connections import Counts
from appliance.gateway.clients.request_log import FinishedRequest
from appliance.gateway.clients.traffic import Traffic
from appliance.gateway.engine.load import Load
from appliance.gateway.face.feed import experts_of
from appliance.gateway.routes.metrics import Metrics

ROOT = Path(__file__).parents[3]
BOARD = ROOT / "compose/kubernetes/components/monitoring/board.json"
PAGE = ROOT / "docs/metrics.md"
# the form of llama-server's answer (server-task.cpp, `to_metrics`)
TOLD = b"""# HELP llamacpp:prompt_disk_saves_total Number of prompts saved to disk
# TYPE llamacpp:prompt_disk_saves_total counter
llamacpp:prompt_disk_saves_total 3
llamacpp:prompt_disk_saved_bytes_total 1.5e+09
llamacpp:prompt_disk_loads_total 2
llamacpp:prompt_disk_loaded_tokens_total 8190
llamacpp:prompt_disk_loaded_bytes_total 1000000
llamacpp:prompt_disk_passed_over_total 1
llamacpp:prompt_seconds_total 0.5
llamacpp:moe_layer_tokens_total 406
llamacpp:moe_hits_total 943
llamacpp:moe_fetched_total 211
llamacpp:moe_cpu_total 470
llamacpp:moe_uploads_total 31
llamacpp:moe_copied_bytes_total 9.51583e+07
llamacpp:moe_predicted_seconds_total 2.35259e-05
llamacpp:moe_measured_seconds_total 22.6637
llamacpp:moe_rule 3
llamacpp:prompt_disk_files 5
llamacpp:prompt_disk_bytes 2.5e+09
"""
NAME = re.compile(r"\b(?:appliance_|vllm:|llamacpp:)\w+")


def row(**fields: object) -> FinishedRequest:
    told = {
        "id": "a1", "time": 1.0, "model": "small", "route": "/v1/messages", "key": "", "stream": True,
        "tokens_in": 30, "tokens_cached": 10, "tokens_out": 20, "waited_s": 0.5, "ttft_s": 0.7, "seconds": 2.0,
        "tokens_per_s": 20.0, "ending": "stop", "status": 200,
    }  # fmt: skip
    return FinishedRequest(**{**told, **fields})  # type: ignore[arg-type]


class Known:
    """A machine that is known."""

    receipts = "off"

    def watch(self, body: bytes, traffic: Traffic, *, load_s: float = 0.0, loaded: str = "") -> None:
        return None

    def watts(self) -> float | None:
        return 30.0

    def joules(self) -> float | None:
        return 5.0

    def losses(self) -> tuple[str, ...]:
        return ("pcie_narrow", "pcie_narrow", "gpu_gone")

    async def refresh(self) -> None:
        return


class Several:
    """Two models, one of which is loaded, on a GPU and in host memory."""

    volume_problem = ""

    def document(self) -> dict[str, Any]:
        figures = {"loads": 3, "evictions": 2, "load_seconds": 4.5}
        return {
            "models": [
                {"name": "small", "is_loaded": True, "holds_mib": {"host": 300, "GPU-0": 5000}, **figures},
                {"name": "other", "is_loaded": False, "holds_mib": {}, **figures},
            ],
            "waiting": [{"name": "other"}],
        }

    async def load(self, name: str) -> None:
        raise NotImplementedError(name)

    async def unload(self, name: str) -> None:
        raise NotImplementedError(name)


def scraped(*rows: FinishedRequest) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of all samples by name and by the values of their labels, in the order of the labels' names."""
    metrics = Metrics(
        connections=Counts(),
        running=lambda: 1,
        events_per_s=lambda: 2.0,
        progress=lambda: Progress(phase=Phase.READY),
        engine_restarts=lambda: 3,
        loads=lambda: [Load(model="small", waiting=1, running=2, kv_use=0.5)],
        aliases=METRIC_ALIASES,
        insights=lambda: {"small": Known()},
        engine_counts=lambda: {"small": parse_counts(TOLD), "other": {"prompt_disk_saves_total": 4.0}},
        fleet=Several(),
    )
    metrics.answered("/v1/messages", "POST", "200", 2.0)
    metrics.began_answer("/v1/messages", 0.7)
    for each in rows:
        metrics.finished(each)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def base(name: str) -> str:
    return re.sub(r"_(?:bucket|sum|count)$", "", name)


def test_tokens_and_times_are_counted_once_a_request() -> None:
    found = scraped(row(), row(tokens_cached=None, ending="tool_calls"))
    assert found["appliance_prompt_tokens_total"] == {("small",): 60.0}
    assert found["appliance_prompt_tokens_cached_total"] == {("small",): 10.0}
    assert found["appliance_prompt_tokens_computed_total"] == {("small",): 50.0}
    assert found["appliance_generated_tokens_total"] == {("small",): 40.0}
    buckets = found["appliance_time_to_first_token_seconds_bucket"]
    assert (buckets["0.5", "small"], buckets["1.0", "small"], buckets["+Inf", "small"]) == (0.0, 2.0, 2.0)
    assert found["appliance_time_to_first_token_seconds_sum"] == {("small",): 1.4}
    assert found["appliance_time_per_output_token_seconds_bucket"]["0.05", "small"] == 2.0


def test_tokens_from_disk_are_a_part_of_the_cached_ones() -> None:
    found = scraped(row(tokens_from_disk=8), row(tokens_from_disk=0), row())
    assert found["appliance_prompt_tokens_from_disk_total"] == {("small",): 8.0}
    assert found["appliance_prompt_tokens_cached_total"] == {("small",): 30.0}


def test_an_engines_counts_of_prompts_on_disk_are_shown_as_far_as_it_tells_them() -> None:
    found = scraped()
    assert found["appliance_prompt_disk_saves_total"] == {("small",): 3.0, ("other",): 4.0}
    assert found["appliance_prompt_disk_saved_bytes_total"] == {("small",): 1.5e9}
    assert found["appliance_prompt_disk_bytes"] == {("small",): 2.5e9}
    assert parse_counts(b"llamacpp:prompt_disk_files nan\n{}") == {}


def test_losses_of_one_kind_are_one_series() -> None:
    found = scraped()
    assert found["appliance_loss"] == {("pcie_narrow", "small"): 1.0, ("gpu_gone", "small"): 1.0}
    assert found["appliance_joules_total"] == {("small",): 5.0}


def test_each_model_of_a_fleet_has_its_series() -> None:
    found = scraped()
    assert found["appliance_model_loaded"] == {("small",): 1.0, ("other",): 0.0}
    assert found["appliance_model_held_mib"] == {("small", "host"): 300.0, ("small", "GPU-0"): 5000.0}
    assert found["appliance_model_evictions_total"] == {("small",): 2.0, ("other",): 2.0}
    assert found["appliance_model_load_seconds_total"] == {("small",): 4.5, ("other",): 4.5}
    assert found["appliance_models_waited_for"] == {(): 1.0}


def test_what_an_engine_did_not_tell_is_not_counted() -> None:
    nothing = {"tokens_in": None, "tokens_cached": None, "tokens_out": None, "ttft_s": None, "tokens_per_s": None}
    found = scraped(row(**nothing, ending="error", status=502))
    assert found["appliance_prompt_tokens_total"] == {("small",): 0.0}
    assert found["appliance_time_to_first_token_seconds_count"] == {("small",): 0.0}
    assert found["appliance_requests_finished_total"] == {("error", "small"): 1.0}


@pytest.mark.parametrize("alias", METRIC_ALIASES, ids=lambda alias: alias.name)
def test_a_second_name_has_the_same_values(alias: object) -> None:
    found = scraped(row(), row(ending="tool_calls"), row(ending="client_left"))
    name, ours = alias.name, alias.ours  # type: ignore[attr-defined]
    ends = ("_bucket", "_sum", "_count") if f"{ours}_bucket" in found else ("",)
    for end in ends:
        assert sum(found[name + end].values()) == sum(found[ours + end].values())
        assert found[name + end]


def test_endings_have_the_words_of_the_other_server() -> None:
    rows = (row(), row(ending="tool_calls"), row(ending="client_left"), row(ending="stopped"), row(ending="length"))
    found = scraped(*rows)["vllm:request_success_total"]
    assert found == {("stop", "small"): 2.0, ("abort", "small"): 1.0, ("error", "small"): 1.0, ("length", "small"): 1.0}


def test_an_engines_counts_of_experts_are_shown_and_absent_without_slots() -> None:
    found = scraped()
    assert found["appliance_moe_hits_total"] == {("small",): 943.0}, "the other model's engine has no slots"
    assert found["appliance_moe_copied_bytes_total"] == {("small",): 9.51583e7}
    assert found["appliance_moe_predicted_seconds_total"] == {("small",): 2.35259e-5}
    assert experts_of(parse_counts(TOLD)) == {"hits": 0.581, "layer_ms": 55.822}
    assert experts_of({}) is None
    assert experts_of({"moe_hits_total": 0.0, "moe_layer_tokens_total": 0.0}) is None


def test_the_board_shows_only_metrics_that_exist() -> None:
    there = scraped(row()).keys()
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in NAME.findall(query)}
    assert len(named) >= 15
    assert named - there == set()


def test_the_page_lists_every_metric_and_every_second_name() -> None:
    told = {name for name in NAME.findall(PAGE.read_text()) if not name.endswith("_")}
    there = {base(name) for name in scraped(row()) if not name.endswith("_created")}
    assert told - there == set()
    assert there - told == set()
