"""docs/settings.md, made of the settings themselves: `python3 -m tests.settings_page` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from appliance.settings import SETTINGS

PAGE = Path(__file__).parents[1] / "docs/settings.md"
HEAD = """# Settings

Every setting is a flag, a variable and a line of `/data/appliance.yaml`, the same words in each. Flags win over
variables, variables over the file. `appliance plan --explain` prints each value with its source.

| flag | variable | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for name, setting in SETTINGS.items():
        shown = ("off", "on")[setting.default] if isinstance(setting.default, bool) else setting.default
        default = "" if shown in (None, ()) else f"`{shown}`"
        cells = (f"`{setting.flag} {setting.metavar}`", f"`APPLIANCE_{name.upper()}`", default, setting.help)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
