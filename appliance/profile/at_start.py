"""Decide what a start does with the profile it finds, or without one. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum

from appliance.values import dataclass

TRIES = 2  # number of starts that may measure: a machine that is always busy must not be measured at each start
# A restart within this time is not measured: the user wants to be served, and the other load has probably not ended.
AGAIN_AFTER = timedelta(hours=1)


class StartAction(StrEnum):
    USE = "serve from the profile"
    WATCH = "look whether something else is at work, and ask again"
    MEASURE = "measure first"
    PREDICT = "serve the prediction"


@dataclass(frozen=True, kw_only=True)
class StartDecision:
    """Action and log line. `words` and `event` are empty if nothing needs to be logged."""

    action: StartAction
    event: str = ""
    words: str = ""
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfileState:
    """State of a profile on the volume.

    `stale` is the reason why the profile is no longer valid; None means no reason is known. `provisional` names what
    disturbed its figures, and is set only if measuring again is due. `busy` names what uses the machine now: None
    before the check, empty if nothing does.
    """

    id: str
    stale: str | None = None
    provisional: str | None = None
    busy: str | None = None
    is_pinned: bool = False


def at_start(found: ProfileState | None, *, tune: str, may_measure: bool) -> StartDecision:
    """Return what the start does with the profile `found`; None means there is none.

    `tune` is the setting. `may_measure` is False while another container measures for the same key. A start never waits
    for that container: it serves what it can, and the next start finds the new profile.
    """
    if found is None:
        return _without(tune, may_measure=may_measure)
    may_measure = may_measure and tune == "first" and not found.is_pinned
    if may_measure and (found.stale is not None or found.provisional):
        return _again(found)
    if found.stale is None:
        return StartDecision(action=StartAction.USE)
    says = _says(found)
    if found.is_pinned:
        words = f"{says}; it is pinned, so it is still used; `appliance profiles unpin` allows a new measurement"
        return StartDecision(action=StartAction.USE, event="profile_stale", words=words, is_warning=True)
    then = {
        "first": "another container on this volume is measuring again, used until the next start",
        "idle": "used until it is measured again while idle",
    }
    words = f"{says}; {then.get(tune, 'measuring is off, so it is still used')}"
    return StartDecision(action=StartAction.USE, event="profile_stale", words=words, is_warning=tune == "off")


def is_due(created: str, *, disturbed_times: int, now: datetime) -> bool:
    """True if a start may measure a provisional profile once more.

    `created` is the time in the profile. False if it is not an ISO time, as in a profile written by hand.
    """
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return False
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return 0 < disturbed_times < TRIES and now - then >= AGAIN_AFTER


def _again(found: ProfileState) -> StartDecision:
    """Measure again only if nothing else uses the machine.

    A disturbed measurement would not replace an undisturbed one, and every start would spend the whole budget for
    nothing.
    """
    if found.busy is None:
        return StartDecision(action=StartAction.WATCH)
    event = "profile_provisional" if found.stale is None else "profile_stale"
    if found.busy:
        words = f"{_says(found)}; used for now, because the machine is busy: {found.busy}"
        return StartDecision(action=StartAction.USE, event=event, words=words, is_warning=found.stale is not None)
    return StartDecision(
        action=StartAction.MEASURE, event=event, words=f"{_says(found)}; nothing else is at work: measuring again"
    )


def _says(found: ProfileState) -> str:
    if found.stale is None:
        return f"profile {found.id} is provisional: {found.provisional} when it was measured"
    return f"profile {found.id} is stale: {found.stale}"


def _without(tune: str, *, may_measure: bool) -> StartDecision:
    if tune == "off":
        return StartDecision(
            action=StartAction.PREDICT, event="tune_off", words="measuring is off: serving the prediction"
        )
    if not may_measure:
        words = "another container on this volume is measuring: serving the prediction, its profile at the next start"
        return StartDecision(action=StartAction.PREDICT, event="tune_elsewhere", words=words)
    if tune == "idle":
        words = "serving the prediction until it is measured while idle"
        return StartDecision(action=StartAction.PREDICT, event="tune_later", words=words)
    return StartDecision(action=StartAction.MEASURE)
