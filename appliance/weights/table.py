"""The table of a model choice, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from appliance.weights.cache.size import in_column
from appliance.weights.choose import Choice, Row

_HEAD = ("", "model", "size", "where it would lie", "context", "decode", "prefill", "tier", "verdict")
_RIGHT = frozenset({"size", "context", "decode", "prefill"})


def as_text(choice: Choice) -> str:
    """Format one line per candidate: `*` is what a start serves, `+` is on the volume. Speeds are tok/s."""
    rows = [_HEAD, *(_cells(row) for row in choice.rows)]
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(_HEAD))]
    return "\n".join(_line(cells, widths) for cells in rows)


def as_document(choice: Choice) -> dict[str, Any]:
    chosen, better = choice.chosen, choice.better
    return {
        "chosen": chosen.candidate.name if chosen else None,
        "better": better.candidate.name if better else None,
        "files": [_document(row) for row in choice.rows],
    }


def _document(row: Row) -> dict[str, Any]:
    candidate = row.candidate
    known = asdict(row.forecast) if row.forecast else {}
    return {
        "model": candidate.name,
        "quantization": candidate.quantization,
        "tier": candidate.tier,
        "bytes": candidate.bytes,
        "missing_bytes": candidate.missing_bytes,
        "parameters_b": candidate.parameters_b,
        "active_b": candidate.active_b,
        "where": known.get("where"),
        "context": known.get("context"),
        "decode_tokens_per_s": known.get("decode_tokens_per_s"),
        "prefill_tokens_per_s": known.get("prefill_tokens_per_s"),
        "verdict": row.verdict,
        "reason": row.reason,
    }


def _cells(row: Row) -> tuple[str, ...]:
    candidate, forecast = row.candidate, row.forecast
    mark = ("*" if row.verdict == "chosen" else " ") + ("+" if candidate.is_here else " ")
    numbers = ("", "", "", "")
    if forecast:
        decode, prefill = _speed(forecast.decode_tokens_per_s), _speed(forecast.prefill_tokens_per_s)
        numbers = (forecast.where, f"{forecast.context:,}", decode, prefill)
    reason = " ".join(row.reason.split())
    verdict = f"{row.verdict}: {reason}" if reason else row.verdict
    return (mark, candidate.name, in_column(candidate.bytes), *numbers, candidate.tier, verdict)


def _speed(speed: float | None) -> str:
    if speed is None:
        return "?"
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    found = [
        cell.rjust(width) if name in _RIGHT else cell.ljust(width)
        for name, cell, width in zip(_HEAD, cells, widths, strict=True)
    ]
    return "  ".join(found).rstrip()
