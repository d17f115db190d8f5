"""Settings of all tests: a test's folder sets its mark. Properties have no deadline, which a busy machine would
miss."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
MARKS = {"unit": "fast", "process": "process", "container": "container", "gpu": "gpu"}

# Settings of the caller: of the product, make, the hub, tools that `inject` knows, compose and terminals.
# A test sets what it wants. APPLIANCE_TEST_… and APPLIANCE_ENGINE_DIR are for the tests.
OF_THE_CALLER = re.compile(
    r"APPLIANCE_(?!TEST_|ENGINE_DIR$)|(?:MODEL|CELL|WAIT|BAKE_WEIGHTS|IMAGE_PREFIX|ALL|SINCE|PARTS|LAYERS|KEPT_BACK|M(?:AKE)?FLAGS|MAKEOVERRIDES|MAKELEVEL)$"
    r"|HF_|HUGGING|OPENAI_|ANTHROPIC_|CLAUDE_|OLLAMA_|COMPOSE_"
    r"|(?:NO_COLOR|FORCE_COLOR|COLUMNS|LINES)$"
)
for _name in [name for name in os.environ if OF_THE_CALLER.match(name)]:
    del os.environ[_name]
# Fakes listen on this machine, and a proxy of the caller's does not lead there.
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(("127.0.0.1", "localhost", "::1", *filter(None, [os.environ.get(_name)])))

# A tenth of the examples of each property, see `tests.builders.examples`; `make test` asks for all.
settings.register_profile("thorough", deadline=None)
settings.register_profile("fast", parent=settings.get_profile("thorough"), max_examples=10)
# For `make properties`, which a workflow runs every week: 2,000 examples of what `make test` takes 60 of.
settings.register_profile("weekly", parent=settings.get_profile("thorough"), max_examples=3400)
settings.load_profile("fast")


# What is imported and collected stays to the end: the garbage collector need not walk it again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {
        path: MARKS[path.relative_to(HERE).parts[0]]
        for path in {item.path for item in items}
        if path.is_relative_to(HERE)
    }
    for item in items:
        mark = marks.get(item.path)
        if mark and not (mark == "fast" and item.get_closest_marker("thorough")):
            item.add_marker(mark)
