"""Addresses at which the hosts of a group reach each other."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time

from appliance.console.report import Report
from appliance.errors import ConfigError
from appliance.serve.hosts.group import TICK_S
from appliance.settings import Settings, parse_address

_Found = tuple[socket.AddressFamily, str]


def leader_of(settings: Settings) -> tuple[str, int]:
    """Return host and port of the leader. Raises ValueError if the setting is missing."""
    host, port = parse_address(settings.leader or "")
    return host, port or settings.port


async def resolve(settings: Settings, report: Report) -> tuple[_Found, ...]:
    """Return all addresses of the leader. Raises ConfigError (10) if its name cannot be resolved.

    A name may be published minutes after its host starts, so it is tried again for `stall_timeout_s`.
    """
    host, port = leader_of(settings)
    until, is_told = time.monotonic() + settings.stall_timeout_s, False
    while True:
        try:
            rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return tuple((family, str(address[0])) for family, _, _, _, address in rows)
        except OSError as error:
            why = error.strerror or str(error)
            if time.monotonic() >= until:
                message = f"setting leader names a host that cannot be resolved: '{host}' "
                message += f"({settings.sources['leader']}): {why}"
                raise ConfigError(
                    message, hint="give an address that this container can resolve, or a number"
                ) from error
        if not is_told:
            report.info("leader_unknown", f"the leader's name cannot be resolved yet: {host}: {why}")
            is_told = True
        await asyncio.sleep(TICK_S)


def own_address(found: tuple[_Found, ...], settings: Settings) -> str:
    """Return the leader's address that is this host's, preferably not loopback. Raises ConfigError (10) without one."""
    for family, address in sorted(found, key=lambda each: is_loopback(each[1])):
        if _ip(address).is_unspecified:
            continue
        try:
            free_port(address, family)
        except OSError:
            continue
        return address
    named = ", ".join(dict.fromkeys(address for _, address in found))
    message = f"setting leader names no address of this host: {named} ({settings.sources['leader']})"
    hint = "host 0 is the leader: give --leader its address, and start all with --network host"
    raise ConfigError(message, hint=hint)


def is_loopback(address: str) -> bool:
    """True for an address that other hosts cannot reach."""
    return _ip(address).is_loopback


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def free_port(address: str, family: socket.AddressFamily | None = None) -> int:
    """Return a port that is free now. Raises OSError if the address is not this host's."""
    kind = family or (socket.AF_INET6 if ":" in address else socket.AF_INET)
    with socket.socket(kind, socket.SOCK_STREAM) as made:
        made.bind((address, 0))
        return int(made.getsockname()[1])


def address_towards(found: tuple[_Found, ...], settings: Settings) -> str:
    """Return this host's address on the route to the leader; sends nothing. Raises ConfigError (10) without a route."""
    why = ""
    for family, address in found:
        with socket.socket(family, socket.SOCK_DGRAM) as made:
            try:
                made.connect((address, 9))
            except OSError as error:
                why = error.strerror or str(error)
                continue
            return str(made.getsockname()[0])
    named = ", ".join(dict.fromkeys(address for _, address in found))
    message = f"setting leader names what this host has no route to: {named} ({settings.sources['leader']}): {why}"
    raise ConfigError(message, hint="look at the networks of this container: --network host has those of its machine")
