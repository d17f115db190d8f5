"""For pytest in a scratch tree: tells what each test reached, or runs chosen tests in a chosen order."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

CHOSEN = "MUTANTS_CHOSEN"

try:
    from appliance import _probe  # type: ignore[attr-defined]
except ImportError:
    _probe = None

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if _probe is None:
        return (yield)
    _probe.begin(item.nodeid)
    began = time.monotonic()
    result = yield
    if not item.stash.get(_failed, False):
        numbers = ",".join(str(number) for number in sorted(_probe.seen))
        _probe.write(f"{item.nodeid}\ts {time.monotonic() - began:.3f}{',' * bool(numbers)}{numbers}\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.passed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = os.environ.get(CHOSEN)
    if not chosen:
        return
    order = {name: at for at, name in enumerate(Path(chosen).read_text(encoding="utf-8").splitlines())}
    left_out = [item for item in items if item.nodeid not in order]
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    config.hook.pytest_deselected(items=left_out)
