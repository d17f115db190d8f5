"""Reads tables of engines: YAML files beside the modules that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_table(path: Path) -> Any:  # noqa: ANN401 - what the table holds
    import yaml  # imported here: few starts need a table

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, a sixth of the time
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - both are safe
