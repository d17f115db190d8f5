"""The candidates of a repository or an address, read from the headers of files that are not here."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from appliance.errors import ModelUnreadableError
from appliance.image_facts import is_projector
from appliance.model import Model, read_model
from appliance.model.formats.gguf import read_gguf
from appliance.model.formats.parts import read_whole
from appliance.model.shapes.described import requantized
from appliance.selection.candidates import Chosen, Option, choose_offered, path_to_be
from appliance.selection.rank import Candidate, Tier
from appliance.selection.request import FromHub
from appliance.settings import HubSettings, hub_settings
from appliance.start.image import ImageContents
from appliance.start.machine import UsableMachine
from appliance.weights.cache.download_set import Wanted, WantedFile
from appliance.weights.download.hub import Offer, offers, read_remote_header, resolve

_QUALITY = re.compile(r"(^|[-_])(Q8|Q6|F16|BF16|F32)", re.IGNORECASE)
_COMPACT = re.compile(r"(^|[-_])(I?Q[123]|TQ)", re.IGNORECASE)


async def choose_from_hub(
    contents: ImageContents,
    found: FromHub,
    environment: Mapping[str, str],
    machine: UsableMachine,
    *,
    on_wait: Callable[[str], None],
) -> Chosen:
    """Choose among the files of a repository or an address. Fetches some MiB of one file.

    Raises ConfigError (10) for a name that does not exist, DownloadError (32) if the network or the hub refuses.
    """
    hub = hub_settings(contents.settings, environment)
    listed = await _listed(contents, found, hub, on_wait)
    models = await _models(contents, listed, hub)
    for each in listed:
        if each.label in models:
            path = path_to_be(each.wanted, contents.settings)
            models[each.label] = replace(models[each.label], path=path, parts=(path,))
    offered = tuple(_offered(found, each, models.get(each.label)) for each in listed)
    return choose_offered(contents, machine, hub, offered, default=offered[0].candidate.name)


async def _listed(
    contents: ImageContents, found: FromHub, hub: HubSettings, on_wait: Callable[[str], None]
) -> tuple[Offer, ...]:
    """Return the file that was named, else all files of the repository."""
    reference = found.reference
    is_folder = contents.engine.model_format == "safetensors"
    if reference.repo and not (reference.quant or reference.path or hub.offline):
        return await offers(reference, hub, is_folder=is_folder, on_wait=on_wait)
    wanted = await resolve(reference.text, hub, is_folder=is_folder, on_wait=on_wait)
    return (Offer(label=reference.quant or Path(wanted.files[0].path).stem, wanted=wanted),)


async def _models(contents: ImageContents, listed: Sequence[Offer], hub: HubSettings) -> dict[str, Model]:
    """Return the models by label. One remote header is read; the others have the same tensors in other types."""
    if contents.engine.model_format != "gguf":
        return {}
    first = min(listed, key=lambda each: (len(_weights(each.wanted)), each.wanted.bytes or 0))
    with tempfile.TemporaryDirectory(prefix="header-") as name:
        header = await _read_header(_weights(first.wanted), hub, Path(name))
        if header is None:
            return {}
        found = {first.label: read_model(header)}
        gguf = read_whole(header)
    for each in listed:
        size = sum(file.bytes or 0 for file in _weights(each.wanted))
        with suppress(ValueError):  # a name without a quantization: unknown before it is here
            found.setdefault(each.label, requantized(gguf, each.label, file_bytes=size or None))
    return {label: replace(model, projector=None) for label, model in found.items()}


async def _read_header(files: Sequence[WantedFile], hub: HubSettings, folder: Path) -> Path | None:
    """Fetch the headers into sparse files and return the first; None if a size is unknown."""
    if not files or any(file.bytes is None for file in files):
        return None
    paths = [folder / Path(file.path).name for file in files]
    for file, path in zip(files, paths, strict=True):
        await read_remote_header(file, hub, path, _is_whole_header)
    return paths[0]


def _is_whole_header(path: Path, real: int) -> bool:
    try:
        return read_gguf(path).header_bytes <= real
    except ModelUnreadableError:  # the header is longer than what was fetched
        return False


def _weights(wanted: Wanted) -> tuple[WantedFile, ...]:
    return tuple(file for file in wanted.files if not is_projector(file.path))


def _offered(found: FromHub, offer: Offer, model: Model | None) -> Option:
    text, repo = found.reference.text, found.reference.repo
    name = f"{repo}:{offer.label}" if repo and not (found.reference.quant or found.reference.path) else text
    size = offer.wanted.bytes or sum(file.bytes or 0 for file in offer.wanted.files)
    parameters_b, active_b = _parameters(model)
    candidate = Candidate(
        name=name,
        tier=tier_of(offer.label),
        quantization=offer.label,
        parameters_b=parameters_b,
        active_b=active_b,
        bytes=size,
        missing_bytes=max(1, size),
    )
    return Option(candidate=candidate, model=model, wanted=offer.wanted, path=None, names=(text,))


def _parameters(model: Model | None) -> tuple[float, float]:
    """Return all and active parameters in 10⁹, experts by their share of the bytes; 1.0 each if unknown."""
    if model is None or not model.parameters:
        return 1.0, 1.0
    all_b = model.parameters / 1e9
    idle = 1 - model.experts_used / model.experts if model.experts else 0.0
    return all_b, all_b * (1 - idle * model.expert_bytes / max(1, model.weights_bytes))


def tier_of(label: str) -> Tier:
    """Return the tier of a quantization label such as Q8_0, UD-Q4_K_XL or IQ2_M."""
    if _COMPACT.search(label):
        return "compact"
    return "quality" if _QUALITY.search(label) else "balanced"
