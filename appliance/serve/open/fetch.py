"""Choose and fetch the weights of a slot, while the gateway tells how far fetching is.

A start whose model is here never imports this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.selection.candidates import Chosen, Option, choose_with_saved, save_choice
from appliance.selection.remote import choose_from_hub
from appliance.selection.request import FromRecipe
from appliance.serve.gateway.pending import Pending
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.announce import announce
from appliance.serve.open.gpus import check_gpus
from appliance.serve.open.open import served_of
from appliance.settings import hub_settings
from appliance.start.inputs import Located, with_model
from appliance.weights.cache.size import in_column
from appliance.weights.download.fetch import fetch
from appliance.weights.download.meter import FetchProgress

SAY_EVERY_S = 10.0
SAY_EVERY_SHARE = 0.05


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
    report.phase(Phase.FETCHING, f"choosing what to serve of {request.name}")
    chosen = await _choose(slot, pending)
    pick = pending.offered = chosen.pick
    pending.forecast = chosen.choice.chosen.forecast if chosen.choice.chosen else None
    announce(chosen, report)
    located = pick.located or await _fetch(slot, pick)
    # In threads: requests are answered meanwhile. Fetching may have taken hours, so the machine is looked at anew.
    start = await asyncio.to_thread(with_model, contents, located, slot.look)
    await asyncio.to_thread(check_gpus, start, report)
    if isinstance(request, FromRecipe):
        save_choice(contents, request, pending.machine, chosen, located)
    report.phase(Phase.STARTING)
    served = served_of(slot, start)
    slot.take(served)
    return served


async def _choose(slot: ModelSlot, pending: Pending) -> Chosen:
    contents, machine, environment, request = slot.contents, pending.machine, slot.environment, pending.request
    if isinstance(request, FromRecipe):
        return await asyncio.to_thread(choose_with_saved, contents, request, environment, machine)

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
    tell = _Tell(report)
    paths = await fetch(pick.wanted, settings.models_dir, hub, tell, partial(report.info, "fetch_note"))
    seconds = time.monotonic() - began
    report.info("fetched", f"fetched {pick.candidate.name} in {seconds:,.0f} s", seconds=round(seconds, 1))
    is_folder = slot.contents.engine.model_format == "safetensors"
    return Located(path=paths[0].parent if is_folder else paths[0], names=pick.names)


def _host(pick: Option) -> str:
    url = pick.wanted.files[0].url if pick.wanted else ""
    return url.split("/")[2] if url.count("/") > 2 else url


class _Tell:
    """Shows progress to clients at once, and in the log every 10 s or 5 %."""

    def __init__(self, report: Report, now: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._now = now
        self._said_at, self._said_share = now(), 0.0

    def __call__(self, progress: FetchProgress) -> None:
        facts = {
            "file": progress.file,
            "bytes_done": progress.bytes_done,
            "bytes_total": progress.bytes_total,
            "bytes_per_s": round(progress.bytes_per_s) if progress.bytes_per_s is not None else None,
            "seconds_left": round(progress.seconds_left) if progress.seconds_left is not None else None,
            "waiting_for": progress.waiting_for,
        }
        self._report.phase(Phase.FETCHING, progress.describe(), **facts)
        share = progress.bytes_done / progress.bytes_total if progress.bytes_total else 0.0
        if self._now() - self._said_at >= SAY_EVERY_S or share - self._said_share >= SAY_EVERY_SHARE:
            self._said_at, self._said_share = self._now(), share
            self._report.info("fetching", progress.describe(), **facts)
