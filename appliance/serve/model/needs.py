"""The need to measure a served model, judged by its profile, its store and its tuning so far."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from appliance.errors import VolumeError
from appliance.profile import Profile
from appliance.profile.at_start import TRIES
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import Glance
from appliance.tune.budget import day_after, utc_day


def needs_measuring(served: ServedModel) -> bool:
    """True if the model makes text, measuring was not given up, and the profile is missing or does not hold."""
    is_possible = not (served.inputs.model.is_embedding_model or served.tuning.is_given_up)
    return is_possible and is_due(served, served.profile)


def is_due(served: ServedModel, profile: Profile | None) -> bool:
    """True if there is no profile, or if it is stale, provisional or unfinished, and not pinned."""
    if profile is None:
        return True
    standing = served.standing_for_use(profile)
    if standing.is_pinned:
        return False
    # A machine that is always busy must not be measured again and again: once in a process, and at most twice.
    may_try_again = profile.disturbed_times < TRIES and not served.tuning.was_measured
    is_provisional = profile.disturbance is not None and may_try_again
    return is_provisional or goes_on_now(profile) or standing.stale is not None


def goes_on_now(profile: Profile) -> bool:
    """True if measuring ended for lack of loads or time, and may go on today."""
    return profile.goes_on_from is not None and utc_day() >= profile.goes_on_from


def goes_on_after_s(profile: Profile | None) -> float | None:
    """Return the seconds until an unfinished profile is measured further; None for any other."""
    if profile is None or profile.goes_on_from is None:
        return None
    return _until_s(profile.goes_on_from)


def until_tomorrow_s() -> float:
    """Return the seconds until the next day of UTC."""
    return _until_s(day_after(utc_day()))


def _until_s(day: str) -> float:
    begins = datetime.fromisoformat(day).replace(tzinfo=UTC)
    return max(0.0, (begins - datetime.now(UTC)).total_seconds())


def begin_again(served: ServedModel) -> bool:
    """Begin anew if measuring was given up only for the volume, and the volume can be written again."""
    if not served.tuning.is_given_up or not isinstance(served.tuning.failure, VolumeError):
        return False
    try:
        if not Glance(partial(_is_writable, served), unknown=False)():
            return False
    except VolumeError:
        return False
    served.tuning.is_given_up = False
    served.tuning.wanted_now.set()
    return True


def _is_writable(served: ServedModel) -> bool:
    with served.store.tuning(served.key):
        return True
