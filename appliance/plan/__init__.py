"""Step 2: what can work on this machine with this model, best prediction first, each value with its reason."""

from appliance.plan.choice import Choice
from appliance.plan.costs import Costs
from appliance.plan.cpu_variant import Kernels, RuledOut, choose_kernels, runnable_variants
from appliance.plan.decide import Plan, with_measured
from appliance.plan.explain import as_document, explain, explain_memory, explain_settings, in_short
from appliance.plan.kv_types import Verdict
from appliance.plan.memory import Memory
from appliance.plan.placement import Placement, Share
from appliance.plan.refine import Projection, refine
from appliance.plan.shortage import Narrowed, Shortage, narrowed
from appliance.plan.space import SMALLEST_WINDOW, Space
from appliance.plan.speculation import (
    SIZES,
    TASTES,
    UNMEASURED,
    Kind,
    Offer,
    Speculation,
    Taste,
    applied,
    as_asked,
    kinds,
    reckon,
    still_applied,
    with_choice,
)
from appliance.plan.speed import Speed

__all__ = [
    "SIZES",
    "SMALLEST_WINDOW",
    "TASTES",
    "UNMEASURED",
    "Choice",
    "Costs",
    "Kernels",
    "Kind",
    "Memory",
    "Narrowed",
    "Offer",
    "Placement",
    "Plan",
    "Projection",
    "RuledOut",
    "Share",
    "Shortage",
    "Space",
    "Speculation",
    "Speed",
    "Taste",
    "Verdict",
    "applied",
    "as_asked",
    "as_document",
    "choose_kernels",
    "explain",
    "explain_memory",
    "explain_settings",
    "in_short",
    "kinds",
    "narrowed",
    "reckon",
    "refine",
    "runnable_variants",
    "still_applied",
    "with_choice",
    "with_measured",
]
