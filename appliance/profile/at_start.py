"""What a start does with the profile that it finds, or finds not: pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Act(StrEnum):
    USE = "serve from the profile"
    MEASURE = "measure first"
    PREDICT = "serve the prediction"


@dataclass(frozen=True, kw_only=True)
class Start:
    """`words` for the log, as `event`; empty where there is nothing to say."""

    act: Act
    event: str = ""
    words: str = ""
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A profile on the volume. `stale` says why it no longer holds; None: it does as far as is known."""

    id: str
    stale: str | None = None
    is_pinned: bool = False


def at_start(found: Found | None, *, tune: str, may_measure: bool) -> Start:
    """`tune` is the setting; `may_measure` is False while another container measures for the same key.

    Nobody waits for another's measuring: what can be served is served, and the next start finds the profile.
    """
    if found is None:
        return _without(tune, may_measure=may_measure)
    if found.stale is None:
        return Start(act=Act.USE)
    says = f"profile {found.id} no longer holds: {found.stale}"
    if found.is_pinned:
        words = f"{says}; it is pinned and used all the same, `appliance profiles unpin` lets it be measured again"
        return Start(act=Act.USE, event="profile_stale", words=words, is_warning=True)
    if tune == "first" and may_measure:
        return Start(act=Act.MEASURE, event="profile_stale", words=f"{says}; measuring again")
    then = {
        "first": "another container on this volume is measuring again, used until the next start",
        "idle": "used until it is measured again while nobody asks",
    }
    words = f"{says}; {then.get(tune, 'measuring is off: used all the same')}"
    return Start(act=Act.USE, event="profile_stale", words=words, is_warning=tune == "off")


def _without(tune: str, *, may_measure: bool) -> Start:
    if tune == "off":
        return Start(act=Act.PREDICT, event="tune_off", words="measuring is off: serving the prediction")
    if not may_measure:
        words = "another container on this volume is measuring: serving the prediction, its profile at the next start"
        return Start(act=Act.PREDICT, event="tune_elsewhere", words=words)
    if tune == "idle":
        words = "serving the prediction until it is measured while nobody asks"
        return Start(act=Act.PREDICT, event="tune_later", words=words)
    return Start(act=Act.MEASURE)
