"""Facts of the hosts that serve one model together: their GPUs and shared memory. Pure."""

from __future__ import annotations

from appliance.engines.engine import Inputs
from appliance.engines.vllm.planning.memory.parallel import shm_needed_mib
from appliance.errors import ConfigError
from appliance.probe import Gpu


def hosts_of(given: Inputs, cards: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], ...]:
    """Return the GPUs of each host by rank, this host first; empty if it serves alone. Hosts that have not joined yet
    are assumed to be like this one. Raises ConfigError (10) if the hosts' GPUs have different compute capabilities."""
    if given.settings.nodes == 1:
        return ()
    others = tuple(host.gpus for host in given.hosts) or (cards,) * (given.settings.nodes - 1)
    hosts = (cards, *others)
    chips = sorted({f"SM {card.sm or 'unknown'}" for host in hosts for card in host})
    if len(chips) > 1:
        message = f"GPUs of a group are of different chips, which have no kernels in common: {', '.join(chips)}"
        raise ConfigError(message, hint="name cards of one kind with --devices on each host, or serve replicas")
    return hosts


def shm_needed_of_host_mib(ranks: int, nodes: int) -> int:
    """Return the MiB of /dev/shm that one host needs for so many ranks. In a group a single rank needs queues too, and
    is counted as two."""
    return shm_needed_mib(ranks if nodes == 1 else max(2, ranks))


def shm_of(given: Inputs) -> int | None:
    """Return the smallest /dev/shm of all hosts, MiB; None if it is unknown for all."""
    known = [mib for mib in (given.hardware.memory.shm_mib, *(host.shm_mib for host in given.hosts)) if mib is not None]
    return min(known, default=None)
