"""Chooses and fetches the weights that a start lacks, while the gateway tells how far it is.

Imported where something is to be fetched, and by no start whose model is here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.serve.announce import announce
from appliance.serve.awaited import AwaitedModel
from appliance.serve.candidates import Chosen, Offered, choose_with_kept, save_choice
from appliance.serve.from_hub import choose_from_hub
from appliance.serve.gpus import check_gpus
from appliance.serve.inputs import with_model
from appliance.serve.served_model import ServedModel, serve_inputs
from appliance.serve.which import FromRecipe, Located
from appliance.settings import hub_settings
from appliance.weights.cache.size import in_column
from appliance.weights.download.fetch import fetch
from appliance.weights.download.meter import FetchProgress

SAY_EVERY_S = 10.0
SAY_EVERY_SHARE = 0.05


async def fetch_model(awaited: AwaitedModel) -> ServedModel:
    """Raises ConfigError (10) for what is not there, DownloadError (32), VolumeError (50), and ModelDoesNotFitError
    (31) before a byte of the weights is fetched. Cancelled within a second; what came stays and is gone on with."""
    report = awaited.report
    report.phase(Phase.FETCHING, f"choosing what to serve of {awaited.found.name}")
    chosen = await _choose(awaited)
    pick = awaited.offered = chosen.pick
    awaited.forecast = chosen.choice.chosen.forecast if chosen.choice.chosen else None
    announce(chosen, report)
    located = pick.located or await _fetch(awaited, pick)
    # In a thread: whoever asks meanwhile is answered.
    start = await asyncio.to_thread(with_model, awaited.contents, located, lambda: awaited.machine)
    await asyncio.to_thread(check_gpus, start, report)
    if isinstance(awaited.found, FromRecipe):
        save_choice(awaited.contents, awaited.found, awaited.machine, chosen, located)
    report.phase(Phase.STARTING)
    awaited.served = serve_inputs(start, awaited.environment, report, number=awaited.number)
    return awaited.served


async def _choose(awaited: AwaitedModel) -> Chosen:
    contents, machine, environment = awaited.contents, awaited.machine, awaited.environment
    if isinstance(awaited.found, FromRecipe):
        return await asyncio.to_thread(choose_with_kept, contents, awaited.found, environment, machine)

    def say(words: str) -> None:
        awaited.report.info("fetch_waits", words)
        awaited.report.phase(Phase.FETCHING, f"choosing what to serve of {awaited.found.name}: {words}")

    return await choose_from_hub(contents, awaited.found, environment, machine, on_wait=say)


async def _fetch(awaited: AwaitedModel, pick: Offered) -> Located:
    report, settings = awaited.report, awaited.settings
    if pick.wanted is None:
        message = f"nothing says where {pick.candidate.name} could be had"  # a candidate without one is never chosen
        raise RuntimeError(message)
    hub = hub_settings(settings, awaited.environment)
    report.info("fetch", f"fetching {pick.candidate.name}: {in_column(pick.candidate.bytes)} from {_host(pick)}")
    began = time.monotonic()
    tell = _Tell(report)
    paths = await fetch(pick.wanted, settings.models_dir, hub, tell, partial(report.info, "fetch_note"))
    seconds = time.monotonic() - began
    report.info("fetched", f"fetched {pick.candidate.name} in {seconds:,.0f} s", seconds=round(seconds, 1))
    is_folder = awaited.contents.engine.model_format == "safetensors"
    return Located(path=_given(paths, is_folder=is_folder), names=pick.names)


def _given(paths: tuple[Path, ...], *, is_folder: bool) -> Path:
    """What the engine is given of them."""
    return paths[0].parent if is_folder else paths[0]


def _host(pick: Offered) -> str:
    url = pick.wanted.files[0].url if pick.wanted else ""
    return url.split("/")[2] if url.count("/") > 2 else url


class _Tell:
    """Progress for clients at once, and for the log now and then."""

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
