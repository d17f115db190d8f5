"""Length of a workload's prompts, by which plans are sized. tune/workload.py has the jobs that are measured."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.settings import Settings, parse_jobs

# Tokens: a chat with a file in it, an agent's history, a long document.
LONG_PROMPTS: Mapping[str, int] = {"chat": 4096, "agent": 8192, "document": 16384}


def long_prompt(settings: Settings) -> int:
    """Return the mean length of the workload's prompts, in tokens."""
    jobs = list(parse_jobs(settings.workload))
    whole = sum(weight for _, weight in jobs)
    return round(sum(LONG_PROMPTS[name] * weight for name, weight in jobs) / whole)
