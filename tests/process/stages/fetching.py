"""`appliance models …` as a process on a volume of its own, against the fake hub."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.fakes.hub.running import RunningHub

ROOT = Path(__file__).parents[3]
NOTHING: Mapping[str, str] = MappingProxyType({})


@contextmanager
def begin(
    hub: RunningHub, data_dir: Path, *words: str, user: int | None = None, environment: Mapping[str, str] = NOTHING
) -> Iterator[subprocess.Popen[str]]:
    """Run `appliance models` in the block and kill it at the end. `user` runs it as that user of group 0, as a
    container may."""
    data_dir.mkdir(exist_ok=True)
    argv = [*_as(user), sys.executable, "-m", "appliance", "models", *words, "--data-dir", str(data_dir)]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "APPLIANCE_"))}
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=keep | hub.environment() | dict(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def _as(user: int | None) -> list[str]:
    """Return the words that run a program as `user`. It may read what root alone may, such as root's Python, and write
    nothing of others."""
    right = "+dac_read_search"
    drop = [
        "setpriv",
        f"--reuid={user}",
        "--regid=0",
        "--clear-groups",
        f"--inh-caps={right}",
        f"--ambient-caps={right}",
    ]
    return [] if user is None else drop


def ended(
    hub: RunningHub, data_dir: Path, *words: str, user: int | None = None, environment: Mapping[str, str] = NOTHING
) -> tuple[int, str, str]:
    with begin(hub, data_dir, *words, user=user, environment=environment) as program:
        out, err = program.communicate(timeout=180)
    assert "Traceback" not in err, err
    return program.returncode, out, err


def until(is_so: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
