"""Layouts of one model over several hosts: tensor parallel within a host, pipeline stages across hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.engines.vllm.planning.inputs import Facts, free_mib
from appliance.engines.vllm.planning.memory.memory import Layout, ends_mib
from appliance.engines.vllm.planning.memory.parallel import choose_cards, staged, tensor_sizes
from appliance.engines.vllm.planning.stages import room_on
from appliance.errors import ConfigError
from appliance.probe import Gpu


def placed_over_hosts(facts: Facts) -> list[tuple[Layout, tuple[Gpu, ...]]]:
    """Return candidate layouts, each with the GPUs of all hosts in the order of ranks. Every host has the same number
    of ranks. Raises ConfigError (10) if the number of hosts, stages or ranks that the user set is impossible."""
    nodes, layers = facts.settings.nodes, facts.shape.layers
    _check_asked(facts)
    if not facts.cards:
        return [(staged(layers, [1.0] * nodes, (0.0, 0.0), tensor=1, nodes=nodes), ())]
    hosts = [sorted(cards, key=lambda card: -free_mib(card, facts.hardware)) for cards in facts.hosts]
    found = []
    for tensor, stages in _local_layouts(facts):
        cards = [choose_cards(host, tensor * stages) for host in hosts]
        ranks = [card for host in cards for card in host]
        rooms = [room_on(facts, card, len(ranks)) for card in ranks]
        layout = staged(layers, rooms, ends_mib(facts.shape, facts.dtype), tensor=tensor, nodes=nodes)
        found.append((layout, tuple(ranks)))
    return found


def _local_layouts(facts: Facts) -> Iterator[tuple[int, int]]:
    """Yield tensor parallel size and stages per host, for the host with fewest GPUs. A host has several stages only if
    it has more GPUs than the model's tensor parallel sizes allow, or if the user set them."""
    pins, nodes, cards = facts.pins, facts.settings.nodes, _cards_a_host(facts)
    allowed = tensor_sizes(facts.shape, cards)
    for tensor in (pins.tensor,) if pins.tensor else allowed:
        if pins.pipeline:
            if tensor * pins.pipeline // nodes <= cards:
                yield tensor, pins.pipeline // nodes
            continue
        for stages in range(1, min(cards // tensor, facts.shape.layers // nodes) + 1):
            if stages == 1 or tensor * stages > max(allowed):
                yield tensor, stages


def _cards_a_host(facts: Facts) -> int:
    return min(len(cards) for cards in facts.hosts)


def _check_asked(facts: Facts) -> None:
    pins, settings, layers = facts.pins, facts.settings, facts.shape.layers
    nodes = settings.nodes
    if nodes > layers:
        message = (
            f"setting nodes asks for {nodes} hosts ({settings.sources['nodes']}), and the model has {layers} layers"
        )
        raise ConfigError(message, hint="use fewer hosts: each has whole layers")
    if pins.pipeline and pins.pipeline % nodes:
        message = f"setting engine_arg asks for {pins.pipeline} stages ({pins.source}) on {nodes} hosts"
        raise ConfigError(message, hint="every host has as many stages: use a multiple of the hosts, or leave it out")
    cards = _cards_a_host(facts)
    ranks = (pins.tensor or 1) * (pins.pipeline or nodes) // nodes
    if facts.cards and ranks > cards:
        message = f"setting engine_arg asks for {ranks} ranks on each host ({pins.source}), and one has {cards} GPUs"
        raise ConfigError(message, hint="ranks of one layer stay within a host: use fewer, or leave it out")
