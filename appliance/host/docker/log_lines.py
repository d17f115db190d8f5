"""What a container of ours wrote: events as JSON lines, and an error in words at its end. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from appliance.values import dataclass

ERROR, HINT = "error: ", "hint: "


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Docker cuts them anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def sentence(line: str) -> str:
    """ "16:49:38 warning: the message"; what is no event of ours stays as it is."""
    try:
        event = json.loads(line)
        time, level, message = event["time"], event["level"], event["message"]
    except (ValueError, KeyError, TypeError):
        return line
    return f"{time[11:19]} {'' if level == 'info' else f'{level}: '}{message}"


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """`message` and `hint` are those of the error that ended it, None where it told of none; `before`: the lines before
    it, as sentences."""

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
