"""For all tests: a test's folder gives its mark; no property has a deadline, which a busy machine would miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
MARKS = {"unit": "fast", "process": "process", "container": "container", "gpu": "gpu"}

settings.register_profile("patient", deadline=None)
# For `make check`: a tenth of the examples of each property, see `tests.builders.examples`.
settings.register_profile("few", parent=settings.get_profile("patient"), max_examples=10)
# For `make properties`, which a workflow runs every week: 2,000 examples of what `make test` takes 60 of.
settings.register_profile("thorough", parent=settings.get_profile("patient"), max_examples=3400)
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(MARKS[item.path.relative_to(HERE).parts[0]])
