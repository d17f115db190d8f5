"""Shapes of models: the published ones that the appliance knows, and small ones from the YAML file beside this."""

from __future__ import annotations

from pathlib import Path

import yaml

from appliance.model.shapes.published import published
from appliance.model.shapes.shape import Shape, as_shape

HERE = Path(__file__).parent
SMALL_VOCABULARY = 512


def _load(file: str) -> dict[str, Shape]:
    shapes = yaml.safe_load((HERE / file).read_text())
    found = {name: {"source": "made up", **row} for name, row in shapes.items()}
    return {name: as_shape(name, row, vocabulary=SMALL_VOCABULARY) for name, row in found.items()}


PUBLISHED = published()
SMALL = _load("small.yaml")
