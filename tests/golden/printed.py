"""What `appliance plan` prints without an image, one file a case, to be read by people and compared by a test.

python -m tests.golden.printed    writes tests/golden/printed/*.txt anew: read the difference before keeping it
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.__main__ import main as appliance
from tests.golden.files import wrapped, write_anew

HERE = Path(__file__).parent / "printed"
FOLDER = HERE.parent / "matrix/machines"
ENDS_AT = "settings\n"  # which tests/unit/appliance/test_main.py looks at


@dataclass(frozen=True, kw_only=True)
class Case:
    """`machines` are files of tests/golden/matrix/machines or of printed/; several are compared."""

    name: str
    machines: tuple[str, ...]
    model: str
    words: tuple[str, ...] = ()


ADA = ("--cell", "llama-cu130-sm89")
CASES = (
    Case(name="laptop", machines=("L8",), model="qwen3-30b-a3b-2507", words=ADA),
    Case(name="two-cards", machines=("2x4090",), model="llama3.3:70b", words=ADA),
    Case(name="two-sockets", machines=("two-sockets",), model="DeepSeek-V3", words=ADA),
    Case(name="recipe", machines=("3060",), model="qwen:8b", words=("--cell", "llama-cu130-sm86")),
    Case(name="compared", machines=("4090", "2x4090", "L8"), model="Qwen/Qwen3-32B", words=ADA),
)


def text(case: Case) -> str:
    """Return the command on the first line, followed by what it prints."""
    is_alone = len(case.machines) == 1
    words = ("plan", "--machine" if is_alone else "--compare", *(f"{name}.yaml" for name in case.machines),
             "--model", case.model, *case.words)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in case.machines:
            shutil.copy(_file(name), f"{name}.yaml")
        said = printed((*words, "--data-dir", folder)).replace(folder, "/data")
    plain = said.partition(f"\n{ENDS_AT}")[0].rstrip()
    lines = [wrapped(line, indent="    ") if is_alone else line for line in plain.splitlines()]
    return "\n".join((" ".join(("appliance", *words)), "", *lines, ""))


def printed(words: Sequence[str]) -> str:
    """Run a command that must succeed, and return its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = appliance(words)
    assert code == 0, err.getvalue()
    return out.getvalue()


def _file(name: str) -> Path:
    own = HERE / f"{name}.yaml"
    return own if own.exists() else FOLDER / f"{name}.yaml"


def main() -> None:
    write_anew(HERE, {case.name: text(case) for case in CASES})


if __name__ == "__main__":
    main()
