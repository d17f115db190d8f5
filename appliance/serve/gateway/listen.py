"""The gateway in front of the models: opened before any engine is ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from appliance.console.report import Report
from appliance.errors import ConfigError, FatalError
from appliance.probe.machine.network import why_unreachable
from appliance.serve.gateway.insight import SlotInsight
from appliance.serve.gateway.slot import ModelSlot
from appliance.settings import Settings
from appliance.system.saved_prompts import keep_owners, owner_of
from appliance.values import dataclass
from appliance.volume import read_or_make_key

if TYPE_CHECKING:
    from appliance.gateway.clients.auth import Keys
    from appliance.gateway.engine.backend import Backend
    from appliance.gateway.engine.gate import FleetDoor, Gate
    from appliance.gateway.server import Gateway

    class Fleet(FleetDoor, Protocol):
        """What loads the models of a gateway: `appliance.serve.fleet.models.Models`."""

        @property
        def is_strict(self) -> bool:
            """True if a request has to name one of the models."""
            ...

        def gate(self, slot: ModelSlot) -> Gate: ...


@dataclass(frozen=True, kw_only=True)
class HostPart:
    """The additional documents and actions on a host of a group. The fields are those of `Backend`."""

    documents: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    actions: Mapping[str, Callable[[bytes], tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    elsewhere: str | None = None


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    report: Report,
    slots: Sequence[ModelSlot],
    *,
    part: HostPart | None = None,
    fleet: Fleet | None = None,
) -> AsyncIterator[Gateway]:
    """Listen at once, so that clients are told what a start is doing; drain before any engine is stopped.

    The gateway has one backend a slot, in their order. `settings` give address and key. `fleet` loads models on demand;
    without it each is always on.
    """
    key = _key(settings, report)
    # here: at the top uvicorn would delay the engine's start
    from appliance.gateway.accounts.accounts import Accounts
    from appliance.gateway.accounts.usage import Usage
    from appliance.gateway.accounts.usage_store import UsageStore
    from appliance.gateway.app import create_app
    from appliance.gateway.clients.auth import Keys
    from appliance.gateway.clients.traces import Traces
    from appliance.gateway.engine.roster import Roster
    from appliance.gateway.server import Gateway

    keys = Keys(frozenset({key})) if key else None
    if keys is not None:
        _drop_prompts_of_lost_keys(settings, keys, report)
    usage = Usage(UsageStore(settings.usage_path))
    traces = Traces(settings.otlp_endpoint) if settings.otlp_endpoint else None
    is_strict = fleet.is_strict if fleet else len(slots) > 1
    app = create_app(
        Roster((backend_of(slot, part, fleet) for slot in slots), is_strict=is_strict),
        keys=keys,
        recent=lambda: list(report.recent),
        doctor=partial(_findings, slots[0]),
        libraries=settings.facts_dir / "web",
        accounts=Accounts(settings.named_keys_path) if key else None,
        usage=usage,
        traces=traces,
        fleet=fleet,
    )
    gateway = await Gateway.open(app, settings.host, settings.port)
    for slot, backend in zip(tuple(slots), gateway.backends, strict=True):
        slot.connect(backend.upstream)
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
        usage.close()
        if traces:
            traces.close()


def _write_address(settings: Settings, port: int) -> None:
    path = settings.address_path
    try:
        path.write_text(f"{settings.host} {port}\n", encoding="ascii")
    except OSError as error:
        source = settings.sources.get("runtime_dir", "default")
        why = (error.strerror or str(error)).lower()
        message = f"setting runtime_dir names a folder that cannot be written: {path.parent} ({source}): {why}"
        raise ConfigError(message, hint="with a read-only root, start it with --tmpfs /tmp") from error


def backend_of(slot: ModelSlot, part: HostPart | None = None, fleet: Fleet | None = None) -> Backend:
    """Return the slot as the gateway sees it."""
    from appliance.gateway.engine.backend import Backend  # here: at the top it would delay the engine's start

    engine = slot.contents.engine
    path, counts = engine.kv_use_path, engine.counts_path
    return Backend(
        name=slot.name,
        socket_path=slot.socket_path,
        routes=engine.routes,
        errors=engine.errors,
        checks_model_name=engine.checks_model_name,
        dropped_headers=engine.dropped_headers,
        progress=lambda: slot.report.progress,
        documents={**slot.documents(), **(part.documents if part else {})},
        actions={
            "tuning": lambda _body: slot.measure_now(),
            "mode": slot.switch_mode,
            **(part.actions if part else {}),
        },
        elsewhere=part.elsewhere if part else None,
        listed=slot.listed,
        shown_name=lambda: slot.name,
        engine_restarts=lambda: slot.restarts,
        aliases=engine.metric_aliases,
        slots=lambda: slot.plan.parallel if slot.plan else 0,
        kv_use=(path, partial(_kv_use, slot)) if path else None,
        counts=(counts, engine.parse_counts) if counts else None,
        insight=SlotInsight(slot),
        gate=fleet.gate(slot) if fleet else None,
    )


def _findings(slot: ModelSlot) -> dict[str, Any]:
    """Return what `appliance doctor` finds here now."""
    from appliance.doctor import examine  # here: no start needs it

    levels = {"pass": "ok", "warn": "warning", "fail": "error"}
    checks = examine(slot.settings, slot.environment).checks
    return {
        "findings": [
            {"name": check.name, "level": levels[check.status], "what": check.value, "hint": check.remedy}
            for check in checks
        ]
    }


def _kv_use(slot: ModelSlot, answer: bytes) -> float | None:
    return slot.contents.engine.parse_kv_use(answer, slot.plan) if slot.plan else None


def _key(settings: Settings, report: Report) -> str | None:
    if not settings.auth:
        report.warning("auth_off", "authentication is off: anyone who reaches the port can use the model")
        return None
    return read_or_make_key(settings.key_path)


def _drop_prompts_of_lost_keys(settings: Settings, keys: Keys, report: Report) -> None:
    """Remove the saved prompts of keys that are gone: removed or replaced while nothing ran, or just before a prompt
    was saved."""
    from appliance.gateway.accounts.named_keys import read_keys  # here: it needs nothing before the engine starts

    try:
        named = {owner_of(key.sha256) for key in read_keys(settings.named_keys_path)}
        keep_owners(settings.prompts_dir, {keys.owner, *named})
    except (OSError, FatalError) as error:
        report.warning("prompts_kept", f"saved prompts of keys that are gone were not looked for: {error}")
