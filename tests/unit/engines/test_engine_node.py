"""What an engine is started with, and shows of it."""

from __future__ import annotations

from appliance.engines.engine import Node


def test_variables_of_the_process_are_in_no_repr() -> None:
    """A log or a traceback that shows a node would show tokens and keys."""
    node = Node(nodes=2, rank=0, address="a", leader="a", port=1, environment={"HF_TOKEN": "hf_secret"})
    assert node.environment["HF_TOKEN"] == "hf_secret"
    assert "secret" not in repr(node)
