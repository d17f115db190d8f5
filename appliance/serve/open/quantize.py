"""Quantize a model that does not fit as it is, before anything can be served. No other start imports this."""

from __future__ import annotations

from functools import cache

from appliance.console.progress import Phase
from appliance.quantize.make import make
from appliance.selection.quantized import start_of
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.open.tell import Tell
from appliance.start.inputs import Located, StartInputs
from appliance.system.detached import detached
from appliance.weights.cache.size import as_size


async def quantize_first(slot: ModelSlot, located: Located, start: StartInputs) -> StartInputs:
    """Make the quantized file that `start` waits for, and return the inputs that serve it.

    Raises VolumeError (50) if it has no room, and the program's error (42 or 43).
    """
    wanted, report = start.quantization, slot.report
    if wanted is None or wanted.model is None:
        message = f"nothing is to be quantized for {slot.name}"
        raise RuntimeError(message)
    report.info("quantize", f"{wanted.describe()}; it will have {as_size(wanted.model.file_bytes)}", type=wanted.kind)
    tell = Tell(report, Phase.QUANTIZING, "quantizing")
    made = await make(wanted, slot.settings.models_dir, start.quantizer, tell, build=slot.contents.image.build_id)
    report.info("quantized", f"made {made.path.name}: {as_size(made.note.bytes)}", type=made.note.kind)
    return await detached(start_of, slot.contents, located, cache(slot.look))
