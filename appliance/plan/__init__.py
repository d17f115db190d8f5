"""Step 2: what can work on this machine with this model, best prediction first, each value with its reason."""

from appliance.plan.choice import Choice
from appliance.plan.decide import Plan, as_measured, nearest, plan, with_measured
from appliance.plan.explain import as_document, explain, explain_memory, explain_settings, in_short
from appliance.plan.memory import Memory
from appliance.plan.placement import Placement, Share
from appliance.plan.refine import Projection, refine
from appliance.plan.speculation import SIZES, UNMEASURED, Kind, Offer, Speculation, applied, kinds, reckon, with_choice
from appliance.plan.speed import Speed

__all__ = [
    "SIZES",
    "UNMEASURED",
    "Choice",
    "Kind",
    "Memory",
    "Offer",
    "Placement",
    "Plan",
    "Projection",
    "Share",
    "Speculation",
    "Speed",
    "applied",
    "as_document",
    "as_measured",
    "explain",
    "explain_memory",
    "explain_settings",
    "in_short",
    "kinds",
    "nearest",
    "plan",
    "reckon",
    "refine",
    "with_choice",
    "with_measured",
]
