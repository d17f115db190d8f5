"""A command that the user sees: our terminal, another folder, its own exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.run import run, run_shown

ROOT = Path(__file__).parents[3]


def test_what_it_prints_goes_to_standard_error_and_its_code_comes_back() -> None:
    script = "import sys\nfrom appliance.run import run_shown\nsys.exit(run_shown(['sh', '-c', 'echo words; exit 7']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "words\n")


def test_it_has_no_standard_input() -> None:
    assert run_shown(["sh", "-c", "read line"]) == 1


def test_a_signal_is_a_negative_code() -> None:
    assert run_shown(["sh", "-c", "kill -9 $$"]) == -9


def test_a_program_that_is_missing_raises() -> None:
    with pytest.raises(FileNotFoundError):
        run_shown(["/no/such/program"])


def test_both_work_in_the_folder_that_is_given(tmp_path: Path) -> None:
    assert run_shown(["sh", "-c", 'test "$PWD" = "$1"', "sh", str(tmp_path)], folder=tmp_path) == 0
    assert run(["pwd"], timeout_s=10, folder=tmp_path).stdout == f"{tmp_path}\n"
