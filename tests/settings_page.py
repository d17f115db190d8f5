"""docs/settings.md, made of the settings themselves: `python3 -m tests.settings_page` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from appliance.settings import SETTINGS

PAGE = Path(__file__).parents[1] / "docs/settings.md"
HEAD = """# Settings

Every setting is a flag, a variable and a line of `/data/appliance.yaml`, the same words in each. Flags win over
variables, variables over the file. `appliance plan --explain` prints each value with its source.

`models:` in the file names several models, each with settings of its own: [several-models.md](several-models.md).

`--users` is the number of people; `--parallel` is an expert's override of what follows from it.

"""
TABLE = """| flag | variable | default | meaning |
|---|---|---|---|
"""
RARE = """
## Settings that few people need

`appliance serve --help` leaves these out; `--help-all` shows them.

"""


def page() -> str:
    return HEAD + _table(is_rare=False) + RARE + _table(is_rare=True)


def _table(*, is_rare: bool) -> str:
    rows = []
    for name, setting in SETTINGS.items():
        if setting.is_rare != is_rare:
            continue
        shown = ("off", "on")[setting.default] if isinstance(setting.default, bool) else setting.default
        default = "" if shown in (None, ()) else f"`{shown}`"
        cells = (f"`{setting.flag} {setting.metavar}`", f"`APPLIANCE_{name.upper()}`", default, setting.help)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return TABLE + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
