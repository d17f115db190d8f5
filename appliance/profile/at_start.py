"""What a start does with the profile that it finds, or finds not: pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum

from appliance.values import dataclass

TRIES = 2  # at starts: a machine that is always busy must not be measured at each
# Who starts again sooner wants to be served, and what was at work has hardly gone.
AGAIN_AFTER = timedelta(hours=1)


class StartAction(StrEnum):
    USE = "serve from the profile"
    WATCH = "look whether something else is at work, and ask again"
    MEASURE = "measure first"
    PREDICT = "serve the prediction"


@dataclass(frozen=True, kw_only=True)
class StartDecision:
    """`words` for the log, as `event`; empty where there is nothing to say."""

    action: StartAction
    event: str = ""
    words: str = ""
    is_warning: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfileState:
    """A profile on the volume. `stale` says why it no longer holds; None: it does as far as is known. `provisional`
    says what spoilt its figures, where it is time to try again; `busy` what is at work now: None before anybody looked,
    empty where nothing is."""

    id: str
    stale: str | None = None
    provisional: str | None = None
    busy: str | None = None
    is_pinned: bool = False


def at_start(found: ProfileState | None, *, tune: str, may_measure: bool) -> StartDecision:
    """`tune` is the setting; `may_measure` is False while another container measures for the same key.

    Nobody waits for another's measuring: what can be served is served, and the next start finds the profile.
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
        words = f"{says}; it is pinned and used all the same, `appliance profiles unpin` lets it be measured again"
        return StartDecision(action=StartAction.USE, event="profile_stale", words=words, is_warning=True)
    then = {
        "first": "another container on this volume is measuring again, used until the next start",
        "idle": "used until it is measured again while nobody asks",
    }
    words = f"{says}; {then.get(tune, 'measuring is off: used all the same')}"
    return StartDecision(action=StartAction.USE, event="profile_stale", words=words, is_warning=tune == "off")


def is_due(created: str, *, disturbed_times: int, now: datetime) -> bool:
    """Whether a start may measure a provisional profile once more. `created` as in the profile; what is no time is of
    hand, and never due."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return False
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return 0 < disturbed_times < TRIES and now - then >= AGAIN_AFTER


def _again(found: ProfileState) -> StartDecision:
    """Only where nothing else is at work: what was disturbed would not replace what was not, and each start that did
    not look would spend the whole budget for nothing."""
    if found.busy is None:
        return StartDecision(action=StartAction.WATCH)
    event = "profile_provisional" if found.stale is None else "profile_stale"
    if found.busy:
        words = f"{_says(found)}; used all the same, since the machine is busy: {found.busy}"
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
        words = "serving the prediction until it is measured while nobody asks"
        return StartDecision(action=StartAction.PREDICT, event="tune_later", words=words)
    return StartDecision(action=StartAction.MEASURE)
