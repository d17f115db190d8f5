"""The story of a start, one line a step: start reading here. Each step is a folder beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.console.report import Report
from appliance.errors import ConfigError, ModelAwayError, ModelDoesNotFitError
from appliance.serve.fleet.models import Models
from appliance.serve.gateway.listen import open_gateway
from appliance.serve.gateway.pending import ToQuantize
from appliance.serve.gateway.stop import stoppable
from appliance.serve.life.bring_up import fetched
from appliance.serve.open.gpus import cross_check_gpus
from appliance.serve.open.open import open_slot
from appliance.settings import Settings
from appliance.supervisor import become_subreaper

OPEN = (
    "traffic between the hosts of a group is not encrypted, and anyone who reaches it can run code here: "
    "keep it on a network of its own"
)


async def serve(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Serve until a stop is asked for; returns 0 once everything is gone. Raises FatalError for any other ending."""
    become_subreaper()
    if settings.nodes > 1:
        return await serve_group(settings, environment, report)
    async with Models.opened(settings, environment, report) as models:
        models.begin()  # the engine of a first model with a profile loads while the gateway is imported
        async with (
            stoppable(report, models.slots),
            open_gateway(settings, report, models.slots, fleet=models) as gateway,
        ):
            await models.serve(gateway)
    return 0


async def serve_group(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Serve as one of several hosts; returns and raises as `serve`."""
    from appliance.serve.hosts.follow import Follower  # both imported late: a start on one host never needs them
    from appliance.serve.hosts.lead import Leader

    report.info("tune_off", "several hosts serve the predicted plan: only a host that serves alone is measured")
    report.warning("open_traffic", OPEN)
    settings = replace(settings, tune="off")
    slot = open_slot(settings, environment, report.for_slot())
    host = Follower(settings) if settings.node_rank else Leader(settings, report)
    async with stoppable(report, [slot]), open_gateway(settings, report, [slot], part=host.part):
        served = await fetched(slot)
        await cross_check_gpus(served.hardware, environment, served.report)
        await (host.follow(served) if isinstance(host, Follower) else host.lead(served))
    return 0


async def measure_only(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """Measure without serving, and keep the profile; returns 0, or 143 (SIGTERM's code) if it was stopped."""
    if settings.nodes > 1:
        message = f"several hosts cannot be measured: nodes is {settings.nodes} ({settings.sources['nodes']})"
        raise ConfigError(message, hint="measure on a host that serves alone; a group serves the predicted plan")
    become_subreaper()
    slot = open_slot(settings, environment, report.for_slot())
    if slot.pending and isinstance(slot.pending.request, ToQuantize):
        message = f"the model does not fit before it is quantized: {slot.name}"
        raise ModelDoesNotFitError(message, hint="`appliance serve` quantizes it first; measure it after that")
    if slot.served is None:
        raise ModelAwayError(slot.pending.words if slot.pending else slot.name)
    async with stoppable(report, [slot]) as stop:
        from appliance.serve.engine.measure import measure_alone  # imported late: the start of a model needs none of it

        await measure_alone(slot.served)
    return 143 if stop.is_set() else 0
