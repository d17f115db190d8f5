"""Step 4: the best plan and how it was found, kept on the volume."""

from appliance.profile.pick import Picked, pick, wants_more
from appliance.profile.record import Key, Profile, dump_profile, make_key, parse_profile, speeds_document, speeds_of
from appliance.profile.store import ProfileStore, Standing

__all__ = [
    "Key",
    "Picked",
    "Profile",
    "ProfileStore",
    "Standing",
    "dump_profile",
    "make_key",
    "parse_profile",
    "pick",
    "speeds_document",
    "speeds_of",
    "wants_more",
]
