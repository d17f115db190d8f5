"""Serve a quantized file in place of an unquantized model. `kinds.py` decides which; README.md has the reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.errors import ModelUnreadableError
from appliance.model import plain_name
from appliance.model.files.quantized import is_unquantized
from appliance.start.image import ImageContents
from appliance.start.inputs import Located, StartInputs, with_model
from appliance.start.machine import UsableMachine


def start_of(contents: ImageContents, located: Located, look: Callable[[], UsableMachine]) -> StartInputs:
    """Read the model as `with_model` does. A quantized file of it that is on the volume takes its place.

    `look` is called once or twice. `quantization` of the result has the decision; None if the model is quantized
    already, if this engine quantizes nothing, or if it was turned off.
    """
    start = with_model(contents, located, look)
    origin = start.inputs.model
    if not _is_asked(start) or not is_unquantized(origin):
        return start
    from appliance.selection.kinds import decide  # here: only an unquantized model needs it

    found = decide(start)
    if found.file is None:
        return replace(start, quantization=found)
    name = plain_name(origin.path)
    instead = Located(
        path=found.file.path,
        names=tuple(dict.fromkeys((*located.names, name))),
        called=located.called or name,
        projector=origin.projector.path if origin.projector else None,
    )
    try:
        return replace(with_model(contents, instead, look), quantization=found)
    except ModelUnreadableError as error:
        why = f"{found.reason}; the file that was made before is damaged: {error.message}"
        return replace(start, quantization=replace(found, file=None, reason=why))


def planned(start: StartInputs) -> StartInputs:
    """Return the inputs with the quantized model as it will be; unchanged if the model itself is served first."""
    found = start.quantization
    if found is None or not found.comes_first or found.model is None:
        return start
    return replace(start, inputs=replace(start.inputs, model=found.model))


def _is_asked(start: StartInputs) -> bool:
    """True if this start may quantize. `auto` leaves embedders alone: an index has vectors of the original weights."""
    asked, model = start.settings.quantize, start.inputs.model
    if asked == "off" or model.format != "gguf" or not start.engine.quantizes(start.install):
        return False
    return asked != "auto" or not model.is_embedding_model
