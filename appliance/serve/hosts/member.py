"""The two documents of a group: the report that each follower sends every second, and the leader's answer."""

from __future__ import annotations

import platform
from dataclasses import fields, replace
from math import isfinite
from typing import Any

from appliance.documents import load, read
from appliance.engines.gpus import asked_for, judged
from appliance.probe import Gpu, Hardware
from appliance.serve.model.served_model import ServedModel
from appliance.values import dataclass

_NAME_MAX = 253  # longest name of a host in DNS
_TOKEN_MAX = 64
_ENDED_MAX = 4096  # bytes
_GPUS_MAX = 64
_NUMBER_MAX = 2**40  # MiB and the like
DOCUMENT = "group"  # its name at the gateway: /appliance/v1/group


@dataclass(frozen=True, kw_only=True)
class FollowerStatus:
    """One host. `token` distinguishes two processes with the same rank."""

    rank: int
    nodes: int
    token: str
    name: str  # for people
    build: str
    cell: str
    model: str  # digest
    gpus: tuple[Gpu, ...]
    shm_mib: int | None = None
    round: str = ""  # the round whose engine it runs; empty: none
    ended: str = ""  # why that engine ended
    is_leaving: bool = False

    @property
    def chips(self) -> str:
        """The chips in words: "SM 90", or "no GPU"."""
        found = sorted({gpu.sm or "unknown" for gpu in self.gpus})
        return f"SM {', '.join(found)}" if found else "no GPU"


@dataclass(frozen=True, kw_only=True)
class LeaderReply:
    """The leader's answer. A follower in another round stops its engine, then starts `plan` for `round`."""

    message: str
    round: str = ""
    is_ready: bool = False  # the whole group answers
    was_ready: bool = False  # in this round or an earlier one, so a failure now may be temporary
    blames: int | None = 0  # rank of the follower whose engine ended this round; 0: none; None: not known yet
    leader: str = ""  # address and port at which the engine's processes meet
    port: int = 0
    plan: dict[str, Any] | None = None


def parse_member(data: bytes) -> FollowerStatus:
    """Parse a report. Raises ValueError for impossible values too: texts are logged, and numbers planned with."""
    return read(FollowerStatus, load(data), rules={FollowerStatus: _is_host, Gpu: _is_gpu})


def _is_host(member: FollowerStatus) -> bool:
    words = (member.name, member.token, member.build, member.cell, member.model, member.round)
    return (
        all(word.isprintable() and len(word) <= _NAME_MAX for word in words)
        and 0 < len(member.token) <= _TOKEN_MAX
        and len(member.ended.encode(errors="replace")) <= _ENDED_MAX
        and _is_text(member.ended)
        and len(member.gpus) <= _GPUS_MAX
        and all(_is_size(number) for number in (member.rank, member.nodes, member.shm_mib))
    )


def _is_gpu(gpu: Gpu) -> bool:
    values = [getattr(gpu, each.name) for each in fields(gpu)]
    numbers = [value for value in values if isinstance(value, int | float)]
    texts = [value for value in values if isinstance(value, str)]
    return (
        all(value == -1 or _is_size(value) for value in numbers)
        and all(text.isprintable() and len(text) <= _NAME_MAX for text in texts)
        and len(gpu.nvlink_peers) <= _GPUS_MAX
        and all(map(_is_size, gpu.nvlink_peers))
        and not gpu.holders
    )


def _is_size(number: float | None) -> bool:
    return number is None or (isfinite(number) and 0 <= number <= _NUMBER_MAX)


def _is_text(text: str) -> bool:
    """True without half of a surrogate pair, which no answer could be encoded with."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(words: str) -> str:
    """Shorten a text for `ended`: an engine's last line may have any length and any bytes."""
    return words.encode(errors="replace")[:_ENDED_MAX].decode(errors="ignore")


def parse_word(data: bytes) -> LeaderReply:
    """Parse the leader's answer. Raises ValueError."""
    return read(LeaderReply, load(data))


def member_of(served: ServedModel, token: str) -> FollowerStatus:
    """Describe this host with its model and its GPUs."""
    settings, image, hardware = served.settings, served.inputs.image, served.hardware
    return FollowerStatus(
        rank=settings.node_rank,
        nodes=settings.nodes,
        token=token,
        name=platform.node(),
        build=image.build_id,
        cell=image.cell,
        model=str(served.key.parts["model"]),
        gpus=tuple(_described(gpu, hardware) for gpu in _gpus_of(served)),
        shm_mib=hardware.memory.shm_mib,
    )


def _gpus_of(served: ServedModel) -> tuple[Gpu, ...]:
    image, settings = served.inputs.image, served.settings
    if image.cuda is None or settings.devices == "none":
        return ()
    return asked_for(settings, [gpu for gpu, why in judged(served.hardware, image) if why is None])


def _described(gpu: Gpu, hardware: Hardware) -> Gpu:
    """Describe a GPU for planning on another host: unified memory counts as its own."""
    if not gpu.is_unified:
        return replace(gpu, holders=())
    memory = hardware.memory
    return replace(gpu, vram_total_mib=memory.total_mib, vram_free_mib=memory.usable_mib, is_unified=False, holders=())


def why_refused(leader: FollowerStatus, member: FollowerStatus) -> str | None:
    """Say why a host is refused; None if it belongs to the leader's group."""
    if member.nodes != leader.nodes:
        return f"its number of hosts is {member.nodes}, and the leader's {leader.nodes}"
    if not 0 < member.rank < leader.nodes:
        return f"its node rank is {member.rank}: followers of {leader.nodes} hosts are 1 to {leader.nodes - 1}"
    if member.build != leader.build:
        return f"its image is build {member.build} ({member.cell}), and the leader's {leader.build} ({leader.cell})"
    if member.model != leader.model:
        return f"its model has other weights: digest {member.model}, and the leader's {leader.model}"
    if member.chips != leader.chips:
        return f"its GPUs are of other chips: {member.chips}, and the leader's {leader.chips}"
    return None
