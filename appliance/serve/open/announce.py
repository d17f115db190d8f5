"""Log the model that was chosen, before the engine is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.console.report import Report
from appliance.selection.rank import Row
from appliance.selection.saved_choice import Better, Saved
from appliance.weights.cache.size import in_column

if TYPE_CHECKING:
    from appliance.selection.candidates import Chosen


def announce(made: Saved | Chosen, report: Report) -> None:
    """Log the model with the reason, a better one if there is one, and damaged files that were passed over."""
    if isinstance(made, Saved):
        report.info("model_chosen", f"serving {made.name}: an earlier start chose it", model=made.name)
    elif made.choice.chosen:
        row = made.choice.chosen
        report.info("model_chosen", _words(row, len(made.offered)), model=row.candidate.name)
        for each in made.choice.rows:
            if each.verdict == "damaged":
                words = f"passed over: {each.candidate.name}: {each.reason}"
                report.warning("model_damaged", words, model=each.candidate.name)
    if made.better:
        report.info("model_better", _better(made.better), model=made.better.name)


def _words(row: Row, count: int) -> str:
    of = f" of {count}" if count > 1 else ""
    where = f", {row.forecast.where}, {row.forecast.context:,} tokens" if row.forecast else ""
    return f"serving {row.candidate.name}{of}: {row.reason}{where}"


def _better(better: Better) -> str:
    does = "serves" if better.is_here else "fetches"
    return f"better here would be {better.name}, {in_column(better.bytes)}: `--model {better.name}` {does} it"
