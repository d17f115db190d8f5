"""Tables of docs/2080ti.md, made of docs/2080ti.yaml, and compared by a test.

python -m tests.golden.published    writes them anew
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import yaml

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "2080ti.md"
KINDS = ("variables", "flags")
_BY = {"appliance": "the appliance", "engine": "vLLM itself", "nobody": "not set"}


class Row(NamedTuple):
    name: str
    published: str
    by: Literal["appliance", "engine", "nobody"]
    why: str
    source: str
    here: str = ""


def rows(kind: str) -> list[Row]:
    found = yaml.safe_load((DOCS / "2080ti.yaml").read_text("utf-8"))
    return [Row(**entry) for entry in found[kind]]


def table(kind: str) -> str:
    head = f"| {kind[:-1]} | published | set by | why | source |\n|---|---|---|---|---|\n"
    cells = ((f"`{row.name}`", row.published, _BY[row.by], row.why, row.source) for row in rows(kind))
    return head + "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in each)} |\n" for each in cells)


def page(text: str) -> str:
    """Return the page with its tables made anew, each between two comments."""
    for kind in KINDS:
        begin, end = f"<!-- {kind} -->\n", f"<!-- end of {kind} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + table(kind) + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
