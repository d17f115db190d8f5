"""Shows rows as a table for people or as JSON for scripts. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from appliance.host.bench.figures import Row, Spread
from appliance.host.bench.measure import Workload

SCHEMA = 1
TEMPLATE_TOKENS = 100  # beginning of each prompt that comes from the chat template and is the same for all
_COLUMNS = (
    "prompt", "at once", "prefill\ntok/s", "decode\ntok/s", "all\ntok/s", "TTFT ms\np50", "\np95",
    "inter-token ms\np50", "\np95", "\np99", "done",
)  # fmt: skip


def document(url: str, model: str, created: str, workload: Workload, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "url": url,
        "model": model,
        "created": created,
        "workload": dataclasses.asdict(workload),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def table(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(*(_cells(row) if not row.skipped else (f"{row.prompt:,}", str(row.concurrency), "skipped")))
    return shown


def _cells(row: Row) -> tuple[str, ...]:
    done = f"{row.answered}" + (f", {row.failed} failed" if row.failed else "")
    return (
        f"{row.prompt:,}",
        str(row.concurrency),
        *_numbers(row.prefill_tokens_per_s, "p50"),
        *_numbers(row.decode_tokens_per_s, "p50"),
        _number(row.throughput_tokens_per_s),
        *_numbers(row.ttft_ms, "p50", "p95"),
        *_numbers(row.inter_token_ms, "p50", "p95", "p99"),
        done,
    )


def _numbers(spread: Spread | None, *names: str) -> list[str]:
    return [_number(getattr(spread, name) if spread else None) for name in names]


def _number(value: float | None) -> str:
    """Return the number with three significant digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def notes(rows: Sequence[Row], workload: Workload) -> list[str]:
    """Return what a reader of the table must know, one sentence each."""
    return [*_skips(rows), *_failures(rows), *_warnings(rows, workload)]


def _skips(rows: Sequence[Row]) -> list[str]:
    reasons = {row.prompt: row.skipped for row in rows if row.skipped}
    return [f"skipped: {prompt:,} tokens do not fit: {reason}" for prompt, reason in reasons.items()]


def _failures(rows: Sequence[Row]) -> list[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.failures)
    return [f"failed: {count} requests: {reason}" for reason, count in total.most_common()]


def _warnings(rows: Sequence[Row], workload: Workload) -> list[str]:
    words = []
    if any(row.cached_share * (row.prompt_tokens or 0.0) > TEMPLATE_TOKENS for row in rows):
        most = max(row.cached_share for row in rows)
        words.append(
            f"prompt cache: up to {most:.0%} of the prompt tokens were not computed; another --seed gives new prompts"
        )
    if any(row.tokens_per_chunk and row.tokens_per_chunk > 1.05 for row in rows):
        most = max(row.tokens_per_chunk or 0.0 for row in rows)
        words.append(
            f"chunks of up to {most:.1f} tokens: percentiles of inter-token latency are of the gaps between chunks"
        )
    short = [row for row in rows if row.completion_tokens is not None and row.completion_tokens < workload.tokens]
    if short:
        least = min(row.completion_tokens or 0 for row in short)
        words.append(f"answers of {least:.0f} of {workload.tokens} tokens: the model ended early")
    return words
