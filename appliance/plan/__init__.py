"""Step 2: what can work on this machine with this model, best prediction first, each value with its reason."""

from appliance.plan.decide import Choice, Plan, as_measured, plan, with_measured
from appliance.plan.explain import as_document, explain, explain_memory, explain_settings, in_short
from appliance.plan.memory import Memory

__all__ = [
    "Choice",
    "Memory",
    "Plan",
    "as_document",
    "as_measured",
    "explain",
    "explain_memory",
    "explain_settings",
    "in_short",
    "plan",
    "with_measured",
]
