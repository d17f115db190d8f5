"""Quantize the model that serves while no request runs, and measure what was lost; the next load takes the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import FatalError, VolumeError
from appliance.model import Model, read_model
from appliance.model.files.quantized import Quantization, QuantizedFile
from appliance.probe import probe
from appliance.quantize.loss import measure_loss
from appliance.quantize.make import change_note, make, refuse
from appliance.serve.background.idle_text import IdleText
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached
from appliance.weights.cache.size import as_size
from appliance.weights.download.meter import FetchProgress

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for types only: it takes half a second to import

# What the engine's programs hold beside mapped files: a buffer of 512 MiB and its result, or the logits
# of 256 tokens. Without it the kernel might end the engine that serves.
ROOM_MIB = 1280
# Small models need less: twice the file, which is more than any of its tensors as f32.
ROOM_OF_FILE = 2.0


class QuantizeIdle:
    """Quantizes one model. Reads and writes `served.quantizing`."""

    def __init__(self, served: ServedModel, traffic: Traffic) -> None:
        self._served = served
        self._text = IdleText(served, traffic)

    async def run(self) -> None:
        """Make what is missing and measure its loss; returns when nothing is left. A failure is a warning.

        Cancelled, it leaves nothing behind, and may be run again.
        """
        found, state = self._served.start.quantization, self._served.quantizing
        if found is None or found.kind is None or state.is_over:
            return
        try:
            await self._text.until_quiet()
            file = found.file or await self._made(found)
            if file is not None and file.note.loss is None and file.note.why_no_loss is None:
                file = await self._measure(found.origin, file)
            state.set_over(file, why=file.note.refused or "" if file else "")
        except FatalError as error:
            state.set_over(None, why=error.message)
            self._served.report.warning("not_quantized", f"{error.message}; {error.hint or 'the original serves on'}")

    async def _made(self, wanted: Quantization) -> QuantizedFile | None:
        served, report = self._served, self._served.report
        if short := await self._why_no_room(wanted.model.file_bytes if wanted.model else 0):
            served.quantizing.set_over(None, why=short)
            report.info(
                "quantize_later", f"{wanted.origin.title} is not quantized: {short}; the next start tries again"
            )
            return None
        report.info("quantize", f"idle: quantizing to {wanted.kind} while the original serves", type=wanted.kind)
        build = served.inputs.image.build_id
        models_dir = served.settings.models_dir
        made = await make(
            wanted, models_dir, served.start.quantizer, self._on_progress, build=build, pauses=self._text.pauses
        )
        words = f"made {made.path.name}: {as_size(made.note.bytes)}; it serves from the next load on"
        report.info("quantized", words, type=made.note.kind)
        served.quantizing.file = made
        return made

    def _on_progress(self, progress: FetchProgress) -> None:
        self._served.quantizing.progress = progress

    async def _why_no_room(self, file_bytes: int) -> str:
        served = self._served
        hardware = await detached(lambda: served.beside(probe(served.settings.data_dir, served.environment)))
        usable = hardware.memory.usable_mib
        needed = min(ROOM_MIB, ROOM_OF_FILE * file_bytes / 2**20)
        return "" if usable >= needed else f"{needed:,.0f} MiB of memory are needed, and {usable:,.0f} MiB are free"

    async def _measure(self, origin: Model, file: QuantizedFile) -> QuantizedFile:
        """Measure the loss and return the file with it. A file without probabilities is refused."""
        report = self._served.report
        try:
            quantized = await detached(read_model, file.path)
            runs = [await self._text.run_of(model) for model in (origin, quantized)]
            loss = await measure_loss(runs[0], runs[1], self._text.pauses)
        except VolumeError:
            raise
        except FatalError as error:
            changed = await detached(change_note, file, why_no_loss=error.message)
            report.info("quantized_loss", f"{file.path.name}: {changed.loss_in_words}")
            return changed
        if loss.is_finite:
            changed = await detached(change_note, file, loss=loss)
            report.info("quantized_loss", f"{file.path.name}: {changed.loss_in_words}")
            return changed
        why = "its probabilities of a text are not finite numbers"
        refused = await detached(refuse, file, why)
        report.warning(
            "quantized_refused", f"{file.path.name} is removed: {why}; the original serves from the next load on"
        )
        return refused
