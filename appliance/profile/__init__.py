"""Step 4: the best plan and the measurements behind it, kept on the volume."""

from appliance.profile.marks import ProfileStatus
from appliance.profile.pick import Picked, best_of, context_to_measure, pick, wants_more
from appliance.profile.record import (
    Key,
    Profile,
    dump_profile,
    make_key,
    parse_profile,
    speeds_document,
    speeds_of,
    speeds_told,
)
from appliance.profile.store import ProfileStore

__all__ = [
    "Key",
    "Picked",
    "Profile",
    "ProfileStatus",
    "ProfileStore",
    "best_of",
    "context_to_measure",
    "dump_profile",
    "make_key",
    "parse_profile",
    "pick",
    "speeds_document",
    "speeds_of",
    "speeds_told",
    "wants_more",
]
