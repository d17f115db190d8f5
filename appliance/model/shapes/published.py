"""Shapes of published models by name, from shapes.yaml in this folder, to plan a model before it is fetched."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from appliance.errors import ConfigError, printable
from appliance.model.architecture.facts import Model
from appliance.model.shapes.described import describe_shape, near_quantization
from appliance.model.shapes.shape import Shape, as_shape
from appliance.model_names import name_key
from appliance.values import dataclass

HERE = Path(__file__).parent
_FILLER = re.compile(r"\b(?:meta|instruct|chat|it|hf)\b[-_. ]?", re.IGNORECASE)  # words that do not change the shape
_DATE = re.compile(r"[-_ ]\d{4}[-_ ]?$")  # date of a release with the same shape: DeepSeek-V3-0324
_GGUF = re.compile(r"[.-]gguf$", re.IGNORECASE)
USUAL = "Q4_K_M"  # default; gpt-oss is published as MXFP4
_OWN = {"gpt-oss": "MXFP4"}  # by architecture: the quantization of the original weights


@dataclass(frozen=True, kw_only=True)
class PublishedShape:
    """One shape and a quantization, as requested by name: qwen3-30b-a3b@Q4_K_M."""

    shape: Shape
    quantization: str

    @property
    def name(self) -> str:
        return f"{self.shape.name}@{self.quantization}"

    def describe(self, folder: Path) -> Model:
        """Make the model of such a file in the folder."""
        return describe_shape(self.shape, folder / f"{self.shape.name}-{self.quantization}.gguf", self.quantization)


@cache
def published() -> Mapping[str, Shape]:
    import yaml  # here: importing yaml costs 20 ms, and only a plan for a model without a file needs it

    rows = yaml.safe_load((HERE / "shapes.yaml").read_text(encoding="utf-8"))
    return {name: as_shape(name, row) for name, row in rows.items()}


def shape_called(called: str) -> PublishedShape | None:
    """Return the shape for a name as people write it: `Qwen/Qwen3-32B`, `llama3.1:8b`, `Gemma 3 27B it`.

    A quantization may follow @ or :. None if no shape has the name, and for a repository or file of GGUF. A vendor
    before the name is ignored: another vendor's model of the same name has the same shape.
    """
    name, quantization = _split(called.rpartition("/")[2])
    if called.count("/") > 1 or "@" in name or _GGUF.search(name):
        return None
    by_key = {name_key(each): each for each in published()}
    plain = _FILLER.sub("", name)
    keys = (name_key(each) for each in (name, plain, _DATE.sub("", plain)))
    found = next((by_key[key] for key in keys if key in by_key), None)
    return find_shape(f"{found}@{quantization}" if quantization else found) if found else None


def _split(name: str) -> tuple[str, str]:
    """Split the name and the quantization after the last @ or :. The latter is "" if it is no quantization:
    `llama3.1:8b`."""
    before, sign, after = name.replace("@", ":").rpartition(":")
    try:
        near_quantization(after)
    except ValueError:
        return name, ""
    return (before, after) if sign else (name, "")


def find_shape(request: str) -> PublishedShape | None:
    """Find a shape by name@quantization, or by the name alone. None for other names, such as repositories and files.

    Raises ConfigError (10) for name@quantization if one of the two is unknown.
    """
    name, at, quantization = request.partition("@")
    shape = None if "/" in name else published().get(name.casefold())
    if shape is None:
        if at and "/" not in request:
            raise _unknown(request, name)
        return None
    if not at:
        return PublishedShape(shape=shape, quantization=_OWN.get(shape.architecture, USUAL))
    try:
        near_quantization(quantization)
    except ValueError as error:
        message = f"model {printable(request)}: {printable(str(error))}"
        raise ConfigError(message, hint=f"such as {shape.name}@{USUAL}, {shape.name}@Q8_0") from error
    return PublishedShape(shape=shape, quantization=quantization.upper())


def near_shapes(called: str) -> list[str]:
    """Return the names of the shapes closest to an unknown name."""
    return difflib.get_close_matches(called.rpartition("/")[2].casefold(), published(), 3)


def _unknown(request: str, name: str) -> ConfigError:
    near = difflib.get_close_matches(name.casefold(), published(), 1)
    message = f"no published model's shape has this name: {printable(request)}"
    return ConfigError(message, hint=f"perhaps you meant {near[0]}" if near else f"known: {', '.join(published())}")
