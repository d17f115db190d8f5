"""Starting points: plans that were measured with another build, or on another machine of the same class."""

from appliance.profile.starting.points import Foreign, first_plan

__all__ = ["Foreign", "first_plan"]
