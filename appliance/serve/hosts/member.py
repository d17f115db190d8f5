"""What the hosts of a group tell each other: one document a second from each follower, and the leader's answer."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

from appliance.documents import load, read
from appliance.engines.gpus import asked_for, judged
from appliance.probe import Gpu, Hardware
from appliance.serve.served_model import ServedModel
from appliance.values import dataclass

DOCUMENT = "group"  # of the gateway: /appliance/v1/group


@dataclass(frozen=True, kw_only=True)
class Member:
    """One host. `token` tells two processes apart that say the same rank."""

    rank: int
    nodes: int
    token: str
    name: str  # for people
    build: str
    cell: str
    model: str  # digest
    gpus: tuple[Gpu, ...]
    shm_mib: int | None = None
    round: str = ""  # whose engine it runs; none while it is empty
    ended: str = ""  # why that engine ended
    is_leaving: bool = False

    @property
    def chips(self) -> str:
        """As in "SM 90", or "no GPU"."""
        found = sorted({gpu.sm or "unknown" for gpu in self.gpus})
        return f"SM {', '.join(found)}" if found else "no GPU"


@dataclass(frozen=True, kw_only=True)
class Word:
    """Of the leader. A follower whose round is another stops its engine, and starts that of `round` by `plan`."""

    message: str
    round: str = ""
    is_ready: bool = False  # the whole group answers
    was_ready: bool = False  # in this round or an earlier one: what fails now may go well the next time
    blames: int | None = 0  # the rank by whose engine this round is over; 0: no follower's; None: not known yet
    leader: str = ""  # address and port that the engine's processes meet at
    port: int = 0
    plan: dict[str, Any] | None = None


def parse_member(data: bytes) -> Member:
    """Raises ValueError."""
    return read(Member, load(data))


def parse_word(data: bytes) -> Word:
    """Raises ValueError."""
    return read(Word, load(data))


def member_of(served: ServedModel, token: str) -> Member:
    settings, image, hardware = served.settings, served.inputs.image, served.hardware
    return Member(
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
    """As another host can plan with it: memory that is the host's is that host's."""
    if not gpu.is_unified:
        return replace(gpu, holders=())
    memory = hardware.memory
    return replace(gpu, vram_total_mib=memory.total_mib, vram_free_mib=memory.usable_mib, is_unified=False, holders=())


def why_refused(leader: Member, member: Member) -> str | None:
    """In words; None for a host that belongs to the leader's group."""
    if member.nodes != leader.nodes:
        return f"it was told of {member.nodes} hosts, and the leader of {leader.nodes}"
    if not 0 < member.rank < leader.nodes:
        return f"its node rank is {member.rank}: followers of {leader.nodes} hosts are 1 to {leader.nodes - 1}"
    if member.build != leader.build:
        return f"its image is build {member.build} ({member.cell}), and the leader's {leader.build} ({leader.cell})"
    if member.model != leader.model:
        return f"its model has other weights: digest {member.model}, and the leader's {leader.model}"
    if member.chips != leader.chips:
        return f"its GPUs are of other chips: {member.chips}, and the leader's {leader.chips}"
    return None
