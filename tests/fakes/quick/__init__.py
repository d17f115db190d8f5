"""What lets a fake start in a third of the time: thousands of engines are started in a run of the process tests.

`program` runs a fake from its bytecode, which Python keeps of imported modules only. `http` and `knobs` stand for
`http.server` and `argparse`, whose imports took longer than all the rest of a fake's start.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def program(name: str) -> tuple[str, ...]:
    """Return the command that runs `main` of the module `tests.fakes.NAME` with the words that follow."""
    # -I and -S: neither this machine's packages nor its variables change the fake, and its start is shorter.
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    return (
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"{begin}; from tests.fakes.{name} import main; sys.exit(main(sys.argv[1:]))",
    )
