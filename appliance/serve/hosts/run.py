"""The story of a start as one of several hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from appliance.console.report import Report
from appliance.serve.gpus import cross_check_gpus
from appliance.serve.hosts.follow import Follower
from appliance.serve.hosts.lead import Leader
from appliance.serve.listen import open_gateway
from appliance.serve.served_model import ServedModel, open_or_await
from appliance.serve.stop import stoppable
from appliance.settings import Settings
from appliance.supervisor import become_subreaper

OPEN = (
    "what the hosts of a group send each other is open and not encrypted, and whoever reaches it can run code here: "
    "keep it on a network of its own"
)


async def serve_with_others(settings: Settings, environment: Mapping[str, str], report: Report) -> int:
    """0 after a stop was asked for and everything is gone; raises FatalError for every other ending."""
    become_subreaper()
    report.info("tune_off", "several hosts serve the prediction: only one that is alone is measured")
    report.warning("open_traffic", OPEN)
    settings = replace(settings, tune="off")
    model = open_or_await(settings, environment, report)
    host = Follower(settings) if settings.node_rank else Leader(settings, report)
    async with stoppable(report, model), open_gateway(settings, report, model, part=host.part) as gateway:
        if not isinstance(model, ServedModel):
            from appliance.serve.fetch import fetch_model  # here: a start whose model is here never needs it

            model = await fetch_model(model)
        model.upstream = gateway.backends[0].upstream
        await cross_check_gpus(model.hardware, environment, report)
        await (host.follow(model) if isinstance(host, Follower) else host.lead(model))
    return 0
