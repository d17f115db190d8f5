"""The story of a start, one line a step: start reading here. Each verb is a file of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from appliance.console.report import Report
from appliance.errors import ConfigError
from appliance.serve.choose import choose_plan, start_from_profile
from appliance.serve.gpus import cross_check_gpus
from appliance.serve.kernels import prove_kernels
from appliance.serve.listen import open_gateway
from appliance.serve.load import launch, wait_loaded
from appliance.serve.served_model import ServedModel, open_model, open_or_await
from appliance.serve.stop import stoppable
from appliance.serve.supervise import serve_until_failure
from appliance.settings import Settings
from appliance.supervisor import become_subreaper
from appliance.system.lack import outlast

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import Backend
    from appliance.plan import Plan
    from appliance.serve.awaited import AwaitedModel


async def serve(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """0 after a stop was asked for and everything is gone; raises FatalError for every other ending."""
    if settings.nodes > 1:
        from appliance.serve.hosts.run import serve_with_others  # here: a start that is alone never needs it

        return await serve_with_others(settings, environment, report)
    become_subreaper()
    model = open_or_await(settings, environment, report)
    if isinstance(model, ServedModel):
        start_from_profile(model)  # the engine loads while the gateway is imported
    async with stoppable(report, model), open_gateway(settings, report, model) as gateway:
        await serve_model(await weights_of(model), gateway.backends[0])
    return 0


async def weights_of(model: ServedModel | AwaitedModel) -> ServedModel:
    """Fetched first where they are not here; the gateway tells how far that is."""
    if isinstance(model, ServedModel):
        return model
    from appliance.serve.fetch import fetch_model  # here: a start whose model is here never needs it

    served = await fetch_model(model)
    start_from_profile(served)  # the same weights may have been measured here before
    return served


async def serve_model(served: ServedModel, backend: Backend) -> None:
    """One of the models behind a gateway. Never returns; raises FatalError when its engine is given up."""
    served.upstream = backend.upstream
    if served.host.plan is None:
        launch(served, await outlast(partial(_chosen, served), "choosing what to serve"))
    await wait_loaded(served)
    await serve_until_failure(served, backend)


async def _chosen(served: ServedModel) -> Plan:
    await prove_kernels(served)
    await cross_check_gpus(served.hardware, served.environment, served.report)
    return await choose_plan(served)


async def measure_only(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """The story without serving: always measures, and keeps the profile. 143, as of SIGTERM, when it was stopped."""
    if settings.nodes > 1:
        message = f"several hosts cannot be measured: nodes is {settings.nodes} ({settings.sources['nodes']})"
        raise ConfigError(message, hint="measure one that is alone; a group serves the prediction")
    become_subreaper()
    served = open_model(settings, environment, report)
    async with stoppable(report, served) as stop:
        from appliance.serve.measure import measure_alone  # here: a start from a profile never needs it

        await measure_alone(served)
    return 143 if stop.is_set() else 0
