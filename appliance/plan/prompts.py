"""How long a prompt of a workload is: what plans are sized by. What is measured is tune/workload.py's."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.settings import Settings, parse_jobs

# Tokens: a chat with a file in it, an agent's history, a long document.
LONG_PROMPTS: Mapping[str, int] = {"chat": 4096, "agent": 8192, "document": 16384}


def long_prompt(settings: Settings) -> int:
    """Tokens of the workload's mean prompt."""
    jobs = list(parse_jobs(settings.workload))
    whole = sum(weight for _, weight in jobs)
    return round(sum(LONG_PROMPTS[name] * weight for name, weight in jobs) / whole)
