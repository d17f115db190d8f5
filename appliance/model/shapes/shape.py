"""The shape of a model: architecture and hyper-parameters, in GGUF keys without the architecture's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a model. `metadata` has no None; its arrays are over layers."""

    name: str
    architecture: str
    metadata: Mapping[str, Any]
    vocabulary: int
    is_tied: bool
    source: str

    @property
    def layers(self) -> int:
        """Number of layers, draft layers included."""
        return int(self.metadata["block_count"])

    @property
    def trunk(self) -> int:
        return self.layers - int(self.metadata.get("nextn_predict_layers", 0))

    def get(self, key: str, default: int = 0) -> int:
        return int(self.metadata.get(key, default))

    def of_layer(self, key: str, layer: int, default: int = 0) -> int:
        value = self.metadata.get(key, default)
        return int(value[layer] if isinstance(value, list | tuple) else value)

    def changed(self, **metadata: Any) -> Shape:  # noqa: ANN401 - values of GGUF keys
        """Return a shape with other metadata. `__` stands for a dot, None removes a key, arrays by layer are
        repeated or cut."""
        merged = {**self.metadata, **{key.replace("__", "."): value for key, value in metadata.items()}}
        layers = merged["block_count"]
        fitted = {
            key: (value * layers)[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for key, value in merged.items()
            if value is not None
        }
        return replace(self, metadata=fitted)


def as_shape(name: str, row: Mapping[str, Any], *, vocabulary: int | None = None) -> Shape:
    """Make a shape from a recipe's or a YAML file's row. Raises KeyError for a missing part, ValueError for an
    invalid number."""
    return Shape(
        name=name,
        architecture=row["architecture"],
        metadata={key: value for key, value in row["metadata"].items() if value is not None},
        vocabulary=int(row["vocabulary"] if vocabulary is None else row.get("vocabulary", vocabulary)),
        is_tied=bool(row.get("is_tied", False)),
        source=row.get("source") or "",
    )
