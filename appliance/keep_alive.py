"""How long a model stays loaded without requests, in the forms that clients of Ollama and LM Studio write."""

from __future__ import annotations

import math
import re

FOREVER = math.inf
MOST_S = 10 * 365 * 86400.0
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
# Go's form, as in 1h30m: https://pkg.go.dev/time#ParseDuration. Ollama parses `keep_alive` with it.
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(h|ms|m|s|us|µs|ns)")


def parse_keep_alive(value: object) -> float:
    """Return seconds: a number or its text means seconds, "5m" and "1h30m" are durations, and every negative value,
    "-1" or "forever" means for ever (infinity). Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        message = "is neither a number of seconds nor a duration"
        raise ValueError(message)
    try:
        seconds = _seconds(value.strip().casefold()) if isinstance(value, str) else float(value)
    except OverflowError:  # JSON has integers of any length
        return FOREVER
    if math.isnan(seconds):
        message = "is no number"
        raise ValueError(message)
    return FOREVER if seconds < 0 or seconds > MOST_S else seconds


def _seconds(text: str) -> float:
    if text in ("forever", "inf"):
        return FOREVER
    if re.fullmatch(r"-?\d{1,12}(\.\d{0,9})?", text):
        return float(text)
    sign, digits = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if not digits or not re.fullmatch(f"(?:{_PART.pattern})+", digits):
        message = "is no duration such as 5m, 1h30m, 90 (seconds), 0 or forever"
        raise ValueError(message)
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(digits))


def shown(seconds: float) -> str:
    """Return words such as "for ever", "5 min" or "90 s"."""
    if seconds == FOREVER:
        return "for ever"
    return f"{seconds / 60:.0f} min" if seconds >= 120 and not seconds % 60 else f"{seconds:g} s"
