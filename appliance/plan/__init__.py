"""Step 2: the types of a plan, which all engines share. Each engine makes its own plans: engines/<name>/."""

from appliance.plan.explain import as_document, explain, explain_memory, explain_settings, summary
from appliance.plan.head import ContextPrice, Head, LargerContext, head_of
from appliance.plan.memory_kill import MemoryKill, held_mib, most_mib, remembered
from appliance.plan.memory_peak import CardPeak, MemoryPeak
from appliance.plan.observed.allocated import Allocated
from appliance.plan.observed.checks import (
    NEEDLE_DEPTHS,
    Checks,
    ComparedPrompt,
    NeedleRow,
    NeedleVerdict,
    SoakCount,
    SpeculationCheck,
    sign_test,
)
from appliance.plan.observed.kv_check import KvCheck
from appliance.plan.observed.shortage import Shortage
from appliance.plan.parts.choice import Choice
from appliance.plan.parts.compilation import Compilation
from appliance.plan.parts.costs import Costs
from appliance.plan.parts.device import Device
from appliance.plan.parts.drafts import (
    ExpectedGain,
    SpeculationGoal,
    SpeedupModel,
    StepCost,
    best_tokens,
    expected_gain,
)
from appliance.plan.parts.kernels import Kernels, RuledOut
from appliance.plan.parts.kv_pair import k_and_v
from appliance.plan.parts.launch import PREDICTED, KnobEffect, Launch
from appliance.plan.parts.speeds import JobSpeed, SpeedAt, Speeds
from appliance.plan.plan import (
    AGENT_CONTEXT,
    CHAT_TOKENS_IN,
    CHAT_TOKENS_OUT,
    CONTEXT_WORTH,
    KINDS,
    NOTHING,
    QUICK_TOKENS_PER_S,
    READABLE_TOKENS_PER_S,
    SIZES,
    SMALLEST_CONTEXT,
    SPECULATION_GOALS,
    SPEED_KEPT,
    UNMEASURED,
    GpuAllocation,
    Interval,
    Kind,
    Memory,
    Offer,
    Placement,
    Plan,
    Speculation,
    Speed,
    launch_as,
    speed_kept,
    with_choice,
    with_launch,
    with_measured,
)
from appliance.plan.prompts import LONG_PROMPTS, long_prompt
from appliance.settings import CONTEXT_STEP

__all__ = [
    "AGENT_CONTEXT",
    "CHAT_TOKENS_IN",
    "CHAT_TOKENS_OUT",
    "CONTEXT_STEP",
    "CONTEXT_WORTH",
    "KINDS",
    "LONG_PROMPTS",
    "NEEDLE_DEPTHS",
    "NOTHING",
    "PREDICTED",
    "QUICK_TOKENS_PER_S",
    "READABLE_TOKENS_PER_S",
    "SIZES",
    "SMALLEST_CONTEXT",
    "SPECULATION_GOALS",
    "SPEED_KEPT",
    "UNMEASURED",
    "Allocated",
    "CardPeak",
    "Checks",
    "Choice",
    "ComparedPrompt",
    "Compilation",
    "ContextPrice",
    "Costs",
    "Device",
    "ExpectedGain",
    "GpuAllocation",
    "Head",
    "Interval",
    "JobSpeed",
    "Kernels",
    "Kind",
    "KnobEffect",
    "KvCheck",
    "LargerContext",
    "Launch",
    "Memory",
    "MemoryKill",
    "MemoryPeak",
    "NeedleRow",
    "NeedleVerdict",
    "Offer",
    "Placement",
    "Plan",
    "RuledOut",
    "Shortage",
    "SoakCount",
    "Speculation",
    "SpeculationCheck",
    "SpeculationGoal",
    "Speed",
    "SpeedAt",
    "Speeds",
    "SpeedupModel",
    "StepCost",
    "as_document",
    "best_tokens",
    "expected_gain",
    "explain",
    "explain_memory",
    "explain_settings",
    "head_of",
    "held_mib",
    "k_and_v",
    "launch_as",
    "long_prompt",
    "most_mib",
    "remembered",
    "sign_test",
    "speed_kept",
    "summary",
    "with_choice",
    "with_launch",
    "with_measured",
]
