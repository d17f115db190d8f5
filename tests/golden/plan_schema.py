"""The JSON schema of what `appliance plan --json` prints, made from the dataclasses that it is printed from.

python -m tests.golden.plan_schema    writes docs/plan.schema.json anew: what is taken away or renamed breaks scripts
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from appliance.abilities import Ability, Result
from appliance.engines.llama.planning.arguments.launch import LlamaLaunch
from appliance.engines.vllm.planning.arguments.launch import VllmLaunch
from appliance.model.files.quantized import Loss
from appliance.plan import Head, LargerContext, Plan
from appliance.preview.text import SCHEMA

PATH = Path(__file__).parents[2] / "docs/plan.schema.json"
LAUNCHES = (LlamaLaunch, VllmLaunch)  # each engine's
_NULL = {"type": "null"}


def schema() -> dict[str, Any]:
    _, parts = msgspec.json.schema_components((Plan, LargerContext, Loss, *LAUNCHES), ref_template="#/$defs/{name}")
    for part in parts.values():
        # All fields are printed, defaults too; and a reader must not fall over one that a later version adds.
        part["required"] = list(part.get("properties", {}))
        for of in part["properties"].values():
            of.pop("default", None)
        part["description"] = inspect.cleandoc(part["description"]) if "description" in part else part["title"]
    plan = parts["Plan"]
    plan["properties"] = {"key": _text(), "knobs": _any("what measuring varies, by name"), **plan["properties"]}
    plan["properties"]["launch"] = {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in LAUNCHES]}
    plan["required"] = list(plan["properties"])
    parts["Memory"]["properties"]["total"] = {"type": "number"}
    parts["Memory"]["required"].append("total")
    parts.pop("Launch", None)
    return _root() | {"$defs": dict(sorted(parts.items()))}


def _root() -> dict[str, Any]:
    properties = {
        "schema": {"const": SCHEMA, "description": "of this document; raised when a field goes or changes its meaning"},
        "head": _object("the lines that the text opens with", **{name: _text() for name in Head.__dataclass_fields__}),
        "larger_contexts": {"type": "array", "items": {"$ref": "#/$defs/LargerContext"}},
        "to_measure": {"type": "array", "items": _text(), "description": "names of what measuring decides"},
        "plan": {"$ref": "#/$defs/Plan"},
        "profile": {"anyOf": [_text("id of the profile that it comes from"), _NULL], "description": "null: predicted"},
        "standing": {"anyOf": [_of_status(), _NULL], "description": "of that profile"},
        "foreign_plan": _text("where the plan was measured, if not on this machine with this build; else absent"),
        "abilities": _object(
            "what this model was seen to do here; absent before the first check",
            summary=_text(),
            rows={"type": "array", "items": _of_ability()},
        ),
        "checks": _object(
            "of the profile: speculative decoding, KV caches, needles, a soak; absent before the first one",
            lines={"type": "array", "items": _text()},
            speculation={"anyOf": [_any("the comparison with engines without it"), _NULL]},
            caches={"type": "array", "items": _any("the comparison of a type of KV cache with an exact one")},
            needles={"type": "array", "items": _any("a fact that was hidden in the context, and its verdict")},
            soak={"anyOf": [_any("counts of its answers"), _NULL]},
        ),
        "fetches": _object("what a start fetches first", model=_text(), bytes={"type": "integer"}),
        "warnings": {
            "type": "array",
            "items": _text(),
            "description": "what is odd about the machine, as a start logs it: a GPU that is left out, and why",
        },
        "quantization": _object(
            "only of an unquantized GGUF file: the quantized file that serves in its place, or that a start makes",
            type=_text("such as Q8_0; the original's own type if it stays"),
            words=_text("the decision with its reason"),
            comes_first={"type": "boolean"},
            file=_text("path of the quantized file; empty if it is not made"),
            loss=_text("the loss of quality against the original, or why it is unknown; empty without a file"),
        ),
        "experts_used": _object(
            "only with fewer experts a token than the model was trained with",
            count={"type": "integer"},
            loss={"anyOf": [{"$ref": "#/$defs/Loss"}, _NULL], "description": "of quality; null: not measured yet"},
            words=_text("the number with its loss"),
        ),
        "shape": _object("the published shape that stands for a file", name=_text(), source=_text()),
        "cell": _object(
            "the cell of the build matrix that stands for an image, where none is",
            name=_text(),
            facts_of=_text("the built cell whose engine facts are used"),
            is_picked={"type": "boolean"},
        ),
        "machine": _object(
            "the file that describes the machine", source=_text(), assumed={"type": "array", "items": _text()}
        ),
        "argv": {"type": "array", "items": _text(), "description": "of the engine"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "appliance plan --json",
        "type": "object",
        "properties": properties,
        "required": ["schema", "head", "larger_contexts", "to_measure", "plan", "profile", "standing", "argv"],
    }


def _of_ability() -> dict[str, Any]:
    result = {"enum": [*map(str, Result)]}
    words = {name: _text() for name in Ability.__dataclass_fields__}
    return _object("one ability", **words | {"whole": result, "streamed": result, "result": result})


def _of_status() -> dict[str, Any]:
    maybe = {"anyOf": [_text(), _NULL]}
    return _object("how it stands", stale=maybe, provisional=maybe, pinned={"type": "boolean"})


def _object(description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "description": description, "properties": properties, "required": list(properties)}


def _text(description: str | None = None) -> dict[str, Any]:
    return {"type": "string", **({"description": description} if description else {})}


def _any(description: str) -> dict[str, Any]:
    return {"type": "object", "description": description}


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


def main() -> None:
    PATH.write_text(text())


if __name__ == "__main__":
    main()
