"""Checks of the appliance's own parts: volume and port, image and engine, model."""

from __future__ import annotations

import errno
import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from appliance.address import read_address
from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.engines.engine import Engine, Install
from appliance.errors import ConfigError, EngineLibraryError, FatalError, ModelAwayError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.model import Model, list_models
from appliance.plan import explain_memory
from appliance.preview.preview import Preview
from appliance.probe import GpuProbe, Hardware
from appliance.probe.machine.network import why_unreachable
from appliance.settings import Settings
from appliance.start.attachments import check_files
from appliance.start.image import check_settings
from appliance.volume import open_volume

SPARE_MIB = 1024  # room for profiles, caches and one more small model
_NO_DRIVER = "start the container with --gpus all on a machine with a GPU"


def volume_check(settings: Settings, hardware: Hardware) -> Check:
    """Write a probe file to the volume, as every start does, and look at its free space."""
    try:
        open_volume(settings.data_dir)
    except FatalError as error:
        return failed("volume", error)
    space = hardware.volume
    free = "unknown" if space.free_mib is None else f"{space.free_mib:,}"
    seen = f"{settings.data_dir}: writable, {free} MiB free"
    if not settings.data_dir.is_mount():
        return warned(
            "volume", f"{seen}; not a mount", f"its content is lost with the container: add -v appliance:{space.path}"
        )
    is_full = space.free_mib is not None and space.free_mib < SPARE_MIB
    return judged("volume", seen, "free some space, or remove models that are not served" if is_full else None)


def port_check(settings: Settings, root: Path = Path("/")) -> Check:
    """Check that the port is free, or held by the appliance of this container. `root` is the folder with /proc and
    /sys."""
    seen = f"{settings.host}:{settings.port}"
    if (check := _listening(settings, seen)).status == "pass" and (words := why_unreachable(settings.host, root)):
        return warned("port", f"{check.value}; {words}", "remove APPLIANCE_HOST, or set it to 0.0.0.0")
    return check


def _listening(settings: Settings, seen: str) -> Check:
    if _answers(settings):
        return passed("port", f"the appliance listens on {seen}")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            hint = "another program uses it" if error.errno == errno.EADDRINUSE else "choose another host or port"
            message = f"cannot listen on {seen}: {(error.strerror or str(error)).lower()}"
            return failed("port", ConfigError(message, hint=f"{hint}: set APPLIANCE_PORT"))
    return passed("port", f"{seen} is free")


def settings_checks(settings: Settings, engine: Engine) -> Iterator[Check]:
    """Yield a failed check for a setting that the engine does not support or that names a missing file; otherwise
    nothing."""
    try:
        check_settings(settings, engine)
        check_files(settings)
    except FatalError as error:
        yield failed("settings", error)


def engine_check(
    engine: Engine, install: Install, image: ImageFacts, gpus: GpuProbe, cpu_variant: str | None = None
) -> Check:
    """Start the engine for its version: it must be the one that was recorded when the image was built."""
    binary, facts = install.engine_dir / engine.binary, install.facts
    if words := engine.why_unasked(image, gpus):
        seen = f"{_shown_engine(image, facts)}, by the image's facts; the engine was not started: {words}"
        return warned("engine", seen, _NO_DRIVER)
    try:
        found = engine.query_installed(install, cpu_variant=cpu_variant)
    except OSError as error:
        message = f"the engine cannot be started: {binary}: {error.strerror}"
        return failed("engine", EngineLibraryError(message, hint="the image is damaged: pull or build it again"))
    except FatalError as error:
        return failed("engine", error)
    for message in _differences(facts, found):
        return failed("engine", EngineLibraryError(message, hint="the image is damaged: pull or build it again"))
    return passed("engine", _shown_engine(image, found))


def _differences(facts: EngineFacts, found: EngineFacts) -> Iterator[str]:
    """Describe how the recorded engine differs from the installed one."""
    if (found.build, found.commit) != (facts.build, facts.commit):
        yield f"the engine is build {found.build} ({found.commit}), the image's facts say {facts.build}"
    if found.version != facts.version:
        yield f"the engine is version {found.version}, the image's facts say {facts.version}"
    there = dict(found.libraries)
    for name, version in facts.libraries:
        if there.get(name) != version:
            yield f"the engine has {name} {there.get(name, 'not at all')}, the image's facts say {version}"
    for what in ("backends", "flags"):
        if missing := sorted(set(getattr(facts, what)) - set(getattr(found, what))):
            yield f"{what} of the engine are missing: {', '.join(missing)}"


def _shown_engine(image: ImageFacts, found: EngineFacts) -> str:
    """Return name, version and parts of the engine. An engine installed from wheels has no build number and no backend
    files."""
    parts = [f"{image.engine} {found.version}", f"build {found.build}" if found.build else ""]
    parts += [f"{len(found.backends)} backends"] if found.backends else []
    parts += [f"{len(found.attention)} attention backends"] if found.attention else []
    parts += [f"{name} {version}" for name, version in found.libraries]
    return ", ".join(part for part in parts if part)


def model_checks(
    settings: Settings,
    image: ImageFacts,
    engine: Engine,
    load: Callable[[], Model],
    preview: Callable[[Model], Preview],
) -> Iterator[tuple[Check, Preview | None]]:
    """Check that there is a model, that it can be read, and that it fits; yield each check with the preview of a start
    if there is one. `load` and `preview` are a start's functions."""
    try:
        if not settings.model and not image.recipe and not _has_models(settings, engine):
            if told := _why_none(settings):
                yield failed("model", told), None
                return
            what = "a .gguf file" if engine.model_format == "gguf" else "a folder of safetensors"
            remedy = f"put {what} into {settings.models_dir}, or name one with APPLIANCE_MODEL"
            yield warned("model", f"none is on the volume: {settings.models_dir}", remedy), None
            return
        model = load()
    except ModelAwayError as error:
        yield warned("model", error.message, error.hint or ""), None
        return
    except FatalError as error:
        yield failed("model", error), None
        return
    yield passed("model", _shown(model)), None
    try:
        first = preview(model)
    except FatalError as error:
        yield failed("model fits", error), None
        return
    yield passed("model fits", f"{first.plan.context:,} tokens; {explain_memory(first.plan)}"), first


def _has_models(settings: Settings, engine: Engine) -> bool:
    """True if a model is on the volume or in a mounted folder of another tool. Raises ConfigError if there are
    several."""
    if list_models(settings.models_dir):
        return True
    from appliance.weights.stores.stores import find_elsewhere  # imported here: only an empty volume is worth the cost

    return find_elsewhere(None, settings, engine.model_format) is not None


def _why_none(settings: Settings) -> FatalError | None:
    from appliance.weights.stores.stores import why_none  # imported here: only an empty volume is worth the cost

    return why_none(settings)


def _shown(model: Model) -> str:
    beside = [each.path.name for each in ([model.projector] if model.projector else [])]
    beside += [adapter.path.name for adapter in model.adapters]
    size = f"{model.file_bytes / 2**20:,.0f} MiB"
    return ", ".join((f"{model.title}: {model.architecture}, {model.quantization}, {size}", *beside))


def _answers(settings: Settings) -> bool:
    """True if an appliance that shares our /tmp has written its address and answers there."""
    if (address := read_address(settings.address_path)) is None:
        return False
    connection = http.client.HTTPConnection(*address, timeout=5)
    with suppress(OSError, http.client.HTTPException), closing(connection):  # it is gone
        connection.request("GET", "/health/live")
        return connection.getresponse().status == 200
    return False
