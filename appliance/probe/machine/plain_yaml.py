"""Read hand-written YAML. Refuses duplicate keys, and aliases, with which a short text can expand without limit."""

from __future__ import annotations

from typing import Any

import yaml


class _Plain(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - nodes of the library
        if self.check_event(yaml.AliasEvent):
            message = f"line {self.get_mark().line + 1}: aliases are not supported"
            raise ValueError(message)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: ANN401
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                message = f"line {key.start_mark.line + 1}: a key is listed twice or is no text: {key.value!s:.40}"
                raise ValueError(message)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_plain(text: str) -> object:
    """Parse YAML. Raises ValueError, or RecursionError if it is nested too deep."""
    try:
        return yaml.load(text, Loader=_Plain)  # noqa: S506 - subclass of the safe loader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
