"""Choose and fetch the weights of a slot, while the gateway tells how far fetching is.

A start whose model is here never imports this.
"""

from __future__ import annotations

import time
from functools import cache, partial

from appliance.console.progress import Phase
from appliance.selection.candidates import Chosen, Option, choose_with_saved, save_choice
from appliance.selection.quantized import start_of
from appliance.selection.remote import choose_from_hub
from appliance.selection.request import FromHub, FromRecipe
from appliance.serve.gateway.pending import Pending, ToQuantize
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.announce import announce
from appliance.serve.open.gpus import check_gpus
from appliance.serve.open.open import served_of, tell_quantization
from appliance.serve.open.tell import Tell
from appliance.settings import hub_settings
from appliance.start.inputs import Located, StartInputs
from appliance.system.detached import detached
from appliance.weights.cache.size import in_column
from appliance.weights.download.fetch import fetch


async def fetch_model(slot: ModelSlot) -> ServedModel:
    """Choose and fetch the weights that the slot waits for; sets and returns its served model.

    Cancelled within a second; the partial file stays, and the next start continues it. Raises ConfigError (10) for what
    does not exist, DownloadError (32), VolumeError (50), and ModelDoesNotFitError (31) before any weights are fetched.
    """
    pending = slot.pending
    if pending is None:
        message = f"nothing is to be fetched for {slot.name}"
        raise RuntimeError(message)
    contents, report, request = slot.contents, slot.report, pending.request
    if isinstance(request, ToQuantize):
        return await _serve(slot, await _quantized(slot, request.located, request.start))
    report.phase(Phase.FETCHING, f"choosing what to serve of {request.name}")
    chosen = await _choose(slot, pending, request)
    pick = pending.offered = chosen.pick
    pending.forecast = chosen.choice.chosen.forecast if chosen.choice.chosen else None
    announce(chosen, report)
    located = pick.located or await _fetch(slot, pick)
    # In threads: requests are answered meanwhile. Fetching may have taken hours, so the machine is looked at anew.
    start = await detached(start_of, contents, located, cache(slot.look))
    if isinstance(request, FromRecipe):
        save_choice(contents, request, pending.machine, chosen, located)
    return await _serve(slot, await _quantized(slot, located, start))


async def _quantized(slot: ModelSlot, located: Located, start: StartInputs) -> StartInputs:
    """Return the inputs; those of the quantized file if nothing else fits, which is made first."""
    if start.quantization is None or not start.quantization.comes_first:
        return start
    from appliance.serve.open.quantize import quantize_first  # here: few starts need it

    return await quantize_first(slot, located, start)


async def _serve(slot: ModelSlot, start: StartInputs) -> ServedModel:
    await detached(check_gpus, start, slot.report)
    slot.report.phase(Phase.STARTING)
    tell_quantization(start, slot.report)
    served = served_of(slot, start)
    slot.take(served)
    return served


async def _choose(slot: ModelSlot, pending: Pending, request: FromRecipe | FromHub) -> Chosen:
    contents, machine, environment = slot.contents, pending.machine, slot.environment
    if isinstance(request, FromRecipe):
        return await detached(choose_with_saved, contents, request, environment, machine)

    def say(words: str) -> None:
        slot.report.info("fetch_waits", words)
        slot.report.phase(Phase.FETCHING, f"choosing what to serve of {request.name}: {words}")

    return await choose_from_hub(contents, request, environment, machine, on_wait=say)


async def _fetch(slot: ModelSlot, pick: Option) -> Located:
    report, settings = slot.report, slot.settings
    if pick.wanted is None:
        message = f"nothing says where {pick.candidate.name} could be had"  # a candidate without one is never chosen
        raise RuntimeError(message)
    hub = hub_settings(settings, slot.environment)
    report.info("fetch", f"fetching {pick.candidate.name}: {in_column(pick.candidate.bytes)} from {_host(pick)}")
    began = time.monotonic()
    tell = Tell(report, Phase.FETCHING, "fetching")
    paths = await fetch(pick.wanted, settings.models_dir, hub, tell, partial(report.info, "fetch_note"))
    seconds = time.monotonic() - began
    report.info("fetched", f"fetched {pick.candidate.name} in {seconds:,.0f} s", seconds=round(seconds, 1))
    is_folder = slot.contents.engine.model_format == "safetensors"
    return Located(path=paths[0].parent if is_folder else paths[0], names=pick.names)


def _host(pick: Option) -> str:
    url = pick.wanted.files[0].url if pick.wanted else ""
    return url.split("/")[2] if url.count("/") > 2 else url
