"""Parses a container's log: events as JSON lines, and an error in words at its end. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from appliance.values import dataclass

ERROR, HINT = "error: ", "hint: "


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield whole lines from Docker's chunks, which end anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def sentence(line: str) -> str:
    """Return an event as in "16:49:38 warning: the message"; a line that is no event of ours is returned unchanged."""
    try:
        event = json.loads(line)
        time, level, message = event["time"], event["level"], event["message"]
    except (ValueError, KeyError, TypeError):
        return line
    return f"{time[11:19]} {'' if level == 'info' else f'{level}: '}{message}"


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The end of a log. `message` and `hint` belong to the error that ended the container, None if the log has none;
    `before` holds the earlier lines as sentences."""

    before: tuple[str, ...]
    message: str | None = None
    hint: str | None = None


def read_last_words(text: str) -> LastWords:
    rows = [line for line in text.splitlines() if line.strip()]
    at = max((number for number, line in enumerate(rows) if line.startswith(ERROR)), default=len(rows))
    before, told = rows[:at], rows[at:]
    hint_at = next((number for number, line in enumerate(told) if line.startswith(HINT)), len(told))
    return LastWords(
        before=tuple(sentence(line.removeprefix("  | ")) for line in before),
        message="\n".join(told[:hint_at]).removeprefix(ERROR) or None,
        hint="\n".join(told[hint_at:]).removeprefix(HINT) or None,
    )
