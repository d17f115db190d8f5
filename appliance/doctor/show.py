"""Shows the checks, for people and for scripts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TextIO

from appliance.doctor.examine import Findings

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def as_json(findings: Findings) -> str:
    rows = [asdict(check) for check in findings.checks]
    document = {"will_start": findings.will_start, "exit_code": findings.exit_code, "checks": rows}
    return json.dumps(document, indent=1)


def show(findings: Findings, stream: TextIO) -> None:
    """Print a table on a terminal; elsewhere one line per check with its remedy below it, for logs and grep."""
    if stream.isatty():
        _show_table(findings, stream)
        return
    width = max(len(check.name) for check in findings.checks)
    for check in findings.checks:
        print(f"{check.status}  {check.name:<{width}}  {_one_line(check.value)}", file=stream)
        if check.remedy:
            print(f"{'':6}{'':<{width}}  -> {_one_line(check.remedy)}", file=stream)
    print(summary(findings), file=stream)


def summary(findings: Findings) -> str:
    count = {status: sum(check.status == status for check in findings.checks) for status in _STYLES}
    warnings = "1 warning" if count["warn"] == 1 else f"{count['warn']} warnings"
    words = f"{count['pass']} passed, {warnings}, {count['fail']} failed"
    if findings.exit_code:
        return f"{words}: a start would end with {findings.exit_code}"
    return f"{words}: this will start" if findings.will_start else f"{words}: no model to start with"


def _show_table(findings: Findings, stream: TextIO) -> None:
    from rich import box  # imported here: only a terminal needs it, and it costs 60 ms
    from rich.table import Table
    from rich.text import Text

    from appliance.console.terminal import Terminal

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "check", "seen", "remedy"):
        table.add_column(heading, overflow="fold", no_wrap=not heading)
    for check in findings.checks:
        row = (Text(check.name), Text(check.value), Text(check.remedy or ""))
        table.add_row(Text(check.status, _STYLES[check.status]), *row)
    console = Terminal(file=stream, highlight=False)
    console.print(table)
    console.print(Text(summary(findings)))


def _one_line(text: str) -> str:
    return " ".join(text.split())
