"""The two builds: both loaded, or one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from docker.api import APIClient

from appliance.host.court.replay import Build
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.http import Gateway, NoAnswerError, unanswered
from appliance.host.docker.launch import GRACE_S
from appliance.host.start.follow import Display, until_ready
from appliance.values import dataclass


class Side(StrEnum):
    OLD = "old"
    NEW = "new"


class Sides(Protocol):
    """How the court comes to a build."""

    @property
    def passes(self) -> int:
        """Passes of one build before the other's turn."""
        ...

    def up(self, side: Side) -> Build:
        """Return the build once it answers. Raises FatalError."""
        ...

    @property
    def working(self) -> tuple[str, ...]:
        """Ids of the containers whose CPU time is not foreign."""
        ...


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Both builds are loaded, and take turns pass by pass."""

    builds: Mapping[Side, Build]
    working: tuple[str, ...]
    passes: int = 1

    def up(self, side: Side) -> Build:
        return self.builds[side]


class InTurn:
    """One build is loaded at a time. A load takes long, so several passes come between two of them."""

    passes = 2

    def __init__(self, client: APIClient, ids: Mapping[Side, str], up: Side, display: Display) -> None:
        """`up` is the build that runs now."""
        self._client = client
        self._ids = ids
        self._up = up
        self._display = display
        self._builds: dict[Side, Build] = {}

    @property
    def working(self) -> tuple[str, ...]:
        return (self._ids[self._up],)

    def up(self, side: Side) -> Build:
        if side is not self._up:
            self._client.stop(self._ids[self._up], timeout=GRACE_S)
            self._up = side
            self._builds.clear()
            self._client.start(self._ids[side])
            found = self._found(side)
            until_ready(self._client, found.id, containers.unlocked(found), self._display)
        if side not in self._builds:
            self._builds[side] = build_of(containers.gateway(self._client, self._found(side)))
        return self._builds[side]

    def _found(self, side: Side) -> Found:
        return containers.choose(containers.all_of_ours(self._client), self._ids[side])


def build_of(gateway: Gateway) -> Build:
    """Return the build behind this gateway. Raises FatalError."""
    return Build(gateway=gateway, model=str(status_of(gateway).get("model")))


def status_of(gateway: Gateway) -> dict[str, Any]:
    """Return the status document. Raises FatalError."""
    try:
        return gateway.document("status")
    except NoAnswerError as error:
        raise unanswered(error) from error
