"""The appliance that runs on this machine, as an endpoint for the verbs that take any."""

from __future__ import annotations

from appliance.host import containers
from appliance.host.daemon import connected
from appliance.host.endpoint import Endpoint
from appliance.settings import process_environment


def running_endpoint(name: str | None) -> Endpoint:
    """Of the container called `name`, or of the only one that runs. ConfigError where there is none or a choice."""
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), name)
        gateway = containers.gateway(client, found)
    return Endpoint(base=gateway.url, key=gateway.key or None, key_source=f"from the volume of {found.name}")
