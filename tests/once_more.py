"""Runs pytest, and the few tests that failed once more, one by one, when all others have ended.

Process and container tests wait for engines and clocks, several at a time on a busy machine. A test that fails there
and passes alone lacked time; it is named, and a file keeps its name. With UNSTEADY=fail, as in nightly runs, it fails.

    python -m tests.once_more STAGE [arguments of pytest]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = 3
"""Failures in more files than this are no lack of time, and none runs again. Files are counted, since all tests of one
may share a browser or a container that came too late."""
KEPT = Path(".make")
FAILED = 1  # pytest's exit code if tests failed, and nothing else went wrong


def main(stage: str, arguments: list[str], kept: Path = KEPT) -> int:
    """Return the exit code for `stage`: 0 if each test passed, at the latest when it ran alone."""
    folder = kept.absolute() / "pytest" / stage
    arguments = ["-o", f"cache_dir={folder}", *arguments]
    code = run(*arguments, "--cache-clear")
    failed = failures(folder) if code == FAILED else []
    if not 0 < len({test.split("::")[0] for test in failed}) <= MOST:
        return code
    print(f"{stage}: {counted(len(failed))} failed beside others; once more, alone", flush=True)
    code = run(*arguments, "--last-failed", "-n", "0", f"--junitxml={kept}/junit/{stage}-alone.xml")
    if code == 0:
        with (kept / "unsteady.txt").open("a") as file:
            for test in failed:
                print(f"::warning::unsteady: failed beside other tests, passed alone: {test}", flush=True)
                print(test, file=file)
    return FAILED if code == 0 and os.environ.get("UNSTEADY") == "fail" else code


def failures(folder: Path) -> list[str]:
    """Return the ids of the tests that failed in the last run whose cache is in `folder`."""
    path = folder / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def counted(number: int) -> str:
    return "1 test" if number == 1 else f"{number} tests"


def run(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
