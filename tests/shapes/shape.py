"""The shape of a model: its architecture and hyper-parameters, read from the YAML files beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SMALL_VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`metadata` has llama.cpp's GGUF keys without the architecture's prefix, and no None."""

    name: str
    architecture: str
    metadata: Mapping[str, Any]
    vocabulary: int
    is_tied: bool
    source: str

    @property
    def layers(self) -> int:
        """With draft layers."""
        return int(self.metadata["block_count"])

    @property
    def trunk(self) -> int:
        return self.layers - int(self.metadata.get("nextn_predict_layers", 0))

    def get(self, key: str, default: int = 0) -> int:
        return int(self.metadata.get(key, default))

    def of_layer(self, key: str, layer: int, default: int = 0) -> int:
        value = self.metadata.get(key, default)
        return int(value[layer] if isinstance(value, list) else value)

    def changed(self, **metadata: Any) -> Shape:
        """With other metadata; `__` stands for a dot, None takes a key out, and arrays by layer are repeated or cut."""
        merged = {**self.metadata, **{key.replace("__", "."): value for key, value in metadata.items()}}
        layers = merged["block_count"]
        fitted = {
            key: (value * layers)[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for key, value in merged.items()
            if value is not None
        }
        return replace(self, metadata=fitted)


def _load(file: str) -> dict[str, Shape]:
    shapes = yaml.safe_load((HERE / file).read_text())
    return {
        name: Shape(
            name=name,
            architecture=shape["architecture"],
            metadata={key: value for key, value in shape["metadata"].items() if value is not None},
            vocabulary=shape.get("vocabulary", SMALL_VOCABULARY),
            is_tied=shape.get("is_tied", False),
            source=shape.get("source", "made up"),
        )
        for name, shape in shapes.items()
    }


PUBLISHED = _load("published.yaml")
SMALL = _load("small.yaml")
