"""Leave the tests of the build half out of `make test`, and say so."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "skip the container tests that build images; make test ALL=1 runs them"
    parser.addoption("--leave-out-build-half", action="store_true", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--leave-out-build-half"):
        return
    for item in items:
        if item.get_closest_marker("build_half") and isinstance(item, pytest.Function):
            about = (item.module.__doc__ or item.path.name).partition("\n")[0]
            item.add_marker(pytest.mark.skip(reason=f"left out, make test ALL=1 runs it: {item.path.name}: {about}"))
