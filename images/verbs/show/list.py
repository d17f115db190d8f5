"""`images list`: every cell, its proofs, and what a platform still needs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from images.choice import proofs
from images.console import say
from images.matrix import matrix
from images.matrix.matrix import Cell
from images.verbs import flags
from images.verbs.checkout import is_locked, load
from images.verbs.state import record_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)


def run(options: argparse.Namespace) -> int:
    loaded, cells = load(options)
    record = record_of(loaded)
    rows = [_row(cell) | state_of(cell, record) for cell in cells]
    lines = [
        f"{row['id']:<22} {row['state']:<28} {row['base']:<20} {row['platforms']:<24} base {row['status']}"
        f"{'; ' + str(row['needs']) if row['needs'] else ''}"
        for row in rows
    ]
    say(options, rows, lines)
    return 0


def state_of(cell: Cell, record: proofs.Record) -> dict[str, object]:
    states = {each: record.state(cell, each) for each in cell.platforms}
    foreign = [each for each in cell.platforms if each != record.own and states[each] != "proven"]
    unlocked = " and a Debian lock" if any(not is_locked(cell, each) for each in foreign) else ""
    return {
        "state": _in_one_line(states),
        "states": states,
        "proofs": [
            proof.model_dump(mode="json") for each in cell.platforms if (proof := record.proofs.get((cell.id, each)))
        ],
        "needs": f"{', '.join(foreign)}: needs a machine of that kind{unlocked}" if foreign else None,
    }


def _in_one_line(states: Mapping[matrix.Platform, proofs.State]) -> str:
    """Returns one word if all platforms agree."""
    words = dict.fromkeys(states.values())
    if len(words) == 1:
        return next(iter(words))
    return ", ".join(f"{each.partition('/')[2]} {state}" for each, state in states.items())


def _row(cell: Cell) -> dict[str, object]:
    return {
        "id": cell.id,
        "engine": _engine_version(cell),
        "cuda": cell.target.cuda,
        "sm": ", ".join(cell.sms) or None,
        "platforms": ",".join(cell.platforms),
        "base": cell.base.image,
        "status": "unresolved" if cell.unresolved else cell.base.status,
        "toolkit": cell.toolkit.source if cell.toolkit else None,
        "gencode": cell.gencode,
        "cpu_variants": list(cell.cpu_variants),
        "size_budget_mib": cell.size_budget_mib,
    }


def _engine_version(cell: Cell) -> str:
    build = f" b{cell.engine.build}" if cell.engine.build is not None else ""
    return f"{cell.engine.title} {cell.engine.version}{build}"
