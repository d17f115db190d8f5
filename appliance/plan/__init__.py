"""Step 2: what can work on this machine with this model, best prediction first, each value with its reason."""

from appliance.plan.choice import Choice
from appliance.plan.decide import Plan, as_measured, kinds_to_check, nearest, plan, with_measured
from appliance.plan.explain import as_document, explain, explain_memory, explain_settings, in_short
from appliance.plan.kv_types import Verdict
from appliance.plan.memory import Memory
from appliance.plan.placement import Placement, Share
from appliance.plan.refine import Projection, refine
from appliance.plan.speed import Speed

__all__ = [
    "Choice",
    "Memory",
    "Placement",
    "Plan",
    "Projection",
    "Share",
    "Speed",
    "Verdict",
    "as_document",
    "as_measured",
    "explain",
    "explain_memory",
    "explain_settings",
    "in_short",
    "kinds_to_check",
    "nearest",
    "plan",
    "refine",
    "with_measured",
]
