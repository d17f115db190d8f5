"""Lines of llama.cpp's log: which of them are errors. Its programs mark lines alike."""

from __future__ import annotations

import re

# Minutes.seconds.milliseconds.microseconds, then D, I, W or E. Where the mark is there, it decides: an informative line
# may well say "failed to" without being the cause. What other libraries print has none.
_MARKED = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} ([A-Z]) ")
_ERROR = re.compile(
    r"\bERROR\b|\bFATAL\b|\bGGML_ASSERT\b|^\w*Error\b|(?i:^error\b|\berror:|\bfailed to\b|\bterminate called\b"
    r"|\bCUDA error\b|\bout of memory\b|\bIllegal instruction\b|\bSegmentation fault\b"
    r"|\bcannot open shared object file\b)"
)


def is_error(line: str) -> bool:
    """Whether it says by itself that something went wrong."""
    if marked := _MARKED.match(line):
        return marked[1] == "E"
    return _ERROR.search(line) is not None


def may_be_error(line: str) -> bool:
    """Whether it may be the cause of an ending: an error, or a line without a mark, whatever it says."""
    marked = _MARKED.match(line)
    return marked is None or marked[1] == "E"
