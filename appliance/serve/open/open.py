"""Open a slot: read the image, find the model, look at the machine, and refuse what cannot work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from appliance.console.report import Report
from appliance.profile import ProfileStore
from appliance.selection.quantized import start_of
from appliance.selection.request import ollama_hint, read_request
from appliance.selection.select import Away, select
from appliance.serve.gateway.pending import Pending, ToQuantize
from appliance.serve.gateway.slot import ModelSlot
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.gpus import check_gpus
from appliance.settings import Settings
from appliance.start.image import read_contents
from appliance.start.inputs import Located, StartInputs
from appliance.start.machine import UsableMachine
from appliance.volume import open_volume


def open_slot(
    settings: Settings, environment: Mapping[str, str], report: Report, *, number: int = 0, is_absent: bool = False
) -> ModelSlot:
    """Make a slot and open its model. With `is_absent` the model is not looked for before `bring_up`.

    Raises ConfigError (10), VolumeError (50) and what `find_model` raises.
    """
    slot = ModelSlot(read_contents(settings), environment, report, number=number)
    open_volume(settings.data_dir, slot.contents.image.build_id)
    if not is_absent:
        slot.take(find_model(slot))
    return slot


def find_model(slot: ModelSlot) -> ServedModel | Pending:
    """Find the slot's model and look at the machine. Changes nothing in the slot, so it may run in a thread.

    Raises an error of code 10, 20 to 23, 30 or 31 for a model or a machine that cannot work.
    """
    contents, environment, report = slot.contents, slot.environment, slot.report
    request = read_request(contents, environment)
    if words := ollama_hint(contents.settings, contents.recipe):
        report.info("model_name", f"{contents.settings.model} is of this image's recipe; {words}")
    look = cache(slot.look)  # one look for this one load
    if isinstance(request, Located):
        return _served_or_to_quantize(slot, request, look)
    found = select(contents, request, environment, look)
    if isinstance(found, Away):
        return Pending(found.request, look(), found.words)
    # here: a start whose model is named by its path never needs them
    from appliance.selection.candidates import Chosen, save_choice
    from appliance.serve.open.announce import announce

    announce(found.made, report)
    served = _served_or_to_quantize(slot, found.located, look)
    if isinstance(found.made, Chosen):
        save_choice(contents, found.request, look(), found.made, found.located)
    return served


def _served_or_to_quantize(
    slot: ModelSlot, located: Located, look: Callable[[], UsableMachine]
) -> ServedModel | Pending:
    """Return the served model; what the slot waits for if the model has to be quantized first."""
    start = start_of(slot.contents, located, look)
    check_gpus(start, slot.report)
    # A further model may fit once the fleet has unloaded others, and is quantized while idle then.
    if start.quantization and start.quantization.comes_first and slot.number == 0:
        return Pending(ToQuantize(located=located, start=start), look(), start.quantization.describe())
    tell_quantization(start, slot.report)
    return served_of(slot, start)


def tell_quantization(start: StartInputs, report: Report) -> None:
    """Log what serves in place of an unquantized model, or what will be made of it."""
    if found := start.quantization:
        report.info("quantization", found.describe(), type=found.kind)


def served_of(slot: ModelSlot, start: StartInputs) -> ServedModel:
    """Make the slot's served model, on a machine whose GPUs were checked. Raises ModelDoesNotFitError (31)."""
    store = ProfileStore(start.settings.profiles_dir, lambda words: slot.report.warning("profile_set_aside", words))
    return ServedModel(start, slot.environment, store, slot.report, number=slot.number)
