"""The gateway in front of the models that are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.console.report import Report
from appliance.errors import ConfigError
from appliance.plan import Plan
from appliance.probe.machine.network import why_unreachable
from appliance.serve.served_model import ServedModel
from appliance.serve.status import documents_of, listed_of, measure_now
from appliance.settings import Settings
from appliance.values import dataclass
from appliance.volume import read_or_make_key

if TYPE_CHECKING:
    from appliance.engines.engine import Engine
    from appliance.gateway.engine.backend import Backend
    from appliance.gateway.server import Gateway
    from appliance.serve.awaited import AwaitedModel


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """What the gateway of one host of several has beside a model's: as `Backend` has it."""

    documents: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    actions: Mapping[str, Callable[[bytes], tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    elsewhere: str | None = None


@asynccontextmanager
async def open_gateway(
    settings: Settings, report: Report, *models: ServedModel | AwaitedModel, part: HostPart | None = None
) -> AsyncIterator[Gateway]:
    """Listens at once: clients are told what a start is doing. Drains before an engine is stopped. Its backends are
    those of the models, in their order. `settings` say where, and with which key."""
    key = _key(settings, report)
    # Here: above, uvicorn would delay the engine's start.
    from appliance.gateway.app import create_app
    from appliance.gateway.clients.auth import Keys
    from appliance.gateway.server import Gateway

    app = create_app([_backend(model, part) for model in models], keys=Keys(frozenset({key})) if key else None)
    gateway = await Gateway.open(app, settings.host, settings.port)
    report.info("listening", f"listening on {settings.host}:{gateway.port}", port=gateway.port)
    if words := why_unreachable(settings.host):
        source = settings.sources.get("host", "default")
        report.warning("only_inside", f"{words}; set host to 0.0.0.0, or leave it out ({source})")
    address = settings.address_path
    _write_address(settings, gateway.port)
    try:
        yield gateway
    finally:
        address.unlink(missing_ok=True)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(gateway.drain(settings.drain_s))


def _write_address(settings: Settings, port: int) -> None:
    path = settings.address_path
    try:
        path.write_text(f"{settings.host} {port}\n", encoding="ascii")
    except OSError as error:
        source = settings.sources.get("runtime_dir", "default")
        why = (error.strerror or str(error)).lower()
        message = f"setting runtime_dir names a folder that cannot be written: {path.parent} ({source}): {why}"
        raise ConfigError(message, hint="with a read-only root, start it with --tmpfs /tmp") from error


def _backend(model: ServedModel | AwaitedModel, part: HostPart | None) -> Backend:
    from appliance.gateway.engine.backend import Backend  # here: above, it would delay the engine's start

    if not isinstance(model, ServedModel):
        engine, documents = model.contents.engine, model.documents()
        listed, measure, restarts = model.listed, model.measure_now, lambda: model.restarts
    else:
        engine, documents = model.start.engine, documents_of(model)
        listed, measure, restarts = partial(listed_of, model), partial(measure_now, model), lambda: model.host.restarts
    path = engine.kv_use_path
    return Backend(
        name=model.name,
        socket_path=model.socket_path,
        routes=engine.routes,
        errors=engine.errors,
        checks_model_name=engine.checks_model_name,
        dropped_headers=engine.dropped_headers,
        progress=lambda: model.report.progress,
        documents={**documents, **(part.documents if part else {})},
        actions={"tuning": lambda _body: measure(), **(part.actions if part else {})},
        elsewhere=part.elsewhere if part else None,
        listed=listed,
        engine_restarts=restarts,
        gauges=engine.load_gauges,
        slots=lambda: plan.parallel if (plan := _plan(model)) else 0,
        kv_use=(path, partial(_kv_use, model, engine)) if path else None,
    )


def _plan(model: ServedModel | AwaitedModel) -> Plan | None:
    """That serves."""
    served = model if isinstance(model, ServedModel) else model.served
    return served.host.plan if served else None


def _kv_use(model: ServedModel | AwaitedModel, engine: Engine, answer: bytes) -> float | None:
    plan = _plan(model)
    return engine.parse_kv_use(answer, plan) if plan else None


def _key(settings: Settings, report: Report) -> str | None:
    if not settings.auth:
        report.warning("auth_off", "authentication is off: whoever reaches the port can use the model")
        return None
    return read_or_make_key(settings.key_path)
