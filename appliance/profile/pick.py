"""Choose which plan of a profile a start serves: the best for the mode that fits the free memory. Also decide whether
that mode needs more measurements. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from appliance.engines.engine import Space
from appliance.plan import Choice, Plan, with_choice, with_measured
from appliance.profile.record import Profile
from appliance.tune.figures.measurement import MARGIN, scored
from appliance.tune.figures.modes import Mode, choose, wanted_context
from appliance.tune.figures.workload import parse_mix
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Picked:
    """Chosen plan. `passed_over` names each better plan and what it lacks now; `why` is the mode's reason."""

    plan: Plan
    why: str
    is_best: bool
    passed_over: tuple[str, ...] = ()


def pick(profile: Profile, mode: str, space: Space) -> Picked | tuple[str, ...]:
    """Return the best plan that fits now. If none fits, return what each plan lacks."""
    plans, checks = {plan.key: plan for plan in profile.plans}, profile.checks
    allocated = {trial.key: trial.allocated for trial in profile.measurements if trial.allocated}
    mix = parse_mix(profile.workload)
    lacking: list[str] = []
    while measured := scored(plans.values(), profile.measurements):
        # A cache that changes answers, and a context in which a needle was lost, serve only if nothing else does.
        proven = [each for each in measured if not checks.refuses(plans[each.key].kv_type)] or measured
        left = [each for each in proven if not checks.has_failed(each.context, plans[each.key].kv_type)] or proven
        chosen = choose(cast("Mode", mode), left, mix, native=profile.native)
        found = space.now(plans[chosen.scored.key], allocated.get(chosen.scored.key))
        if not isinstance(found, str):
            plan = _with_slots(with_measured(found, chosen.why, profile.plans), profile.plan)
            plan = _with_speculation(plan, profile, space)
            lost = min((each.context for each in proven if each not in left), default=None)
            return Picked(
                plan=_with_context_that_holds(plan, lost),
                why=chosen.why if lost is None else f"{chosen.why}; needles were lost in a context of {lost:,}",
                is_best=not lacking,
                passed_over=tuple(lacking),
            )
        lacking.append(f"{chosen.scored.key}: {found}")
        del plans[chosen.scored.key]
    return tuple(lacking)


def best_of(profile: Profile | None, mode: str, space: Space) -> Plan:
    """Return the best measured plan that fits, else the prediction. Raises ModelDoesNotFitError (31)."""
    picked = pick(profile, mode, space) if profile else ()
    return picked.plan if isinstance(picked, Picked) else space.predicted


def wants_more(profile: Profile, mode: str, space: Space, *, budget_s: float) -> bool:
    """True if this mode needs an unmeasured context length and one more trial fits the budget.

    Always False for a mode that was measured already. `space` is that of the mode.
    """
    seen = scored(profile.plans, profile.measurements)
    if not seen or mode in (profile.mode, *profile.other_modes):
        return False
    if MARGIN * max(trial.seconds for trial in profile.measurements if trial.points) > budget_s:
        return False
    contexts = {plan.context for plan in space.all()}
    mix = parse_mix(profile.workload)
    return wanted_context(cast("Mode", mode), contexts, seen, mix, native=profile.native) is not None


def _with_speculation(plan: Plan, profile: Profile, space: Space) -> Plan:
    """Return the plan with the speculative decoding of the profile, unless the check of answers refused it."""
    check = profile.checks.speculation
    if check is None or check.verdict != "refused":
        return space.speculating_as(plan, profile.plan)
    return with_choice(plan, Choice(name="speculation", value="off", reason=check.describe(), source="measured"))


def _with_context_that_holds(plan: Plan, lost: int | None) -> Plan:
    """Return the plan with the reason for its context: needles were lost in a context of `lost` tokens."""
    if lost is None:
        return plan
    why = f"chosen since needles were lost in a context of {lost:,}"
    return with_choice(plan, Choice(name="context", value=f"{plan.context:,}", reason=why, source="measured"))


def context_to_measure(profile: Profile) -> int | None:
    """Return a context in which needles were found if one was lost in every measured context; else None."""
    checks = profile.checks
    if not all(checks.has_failed(plan.context, plan.kv_type) for plan in profile.plans):
        return None
    held = (checks.holding(kv_type) for kv_type in {plan.kv_type for plan in profile.plans})
    return max(filter(None, held), default=None)


def _with_slots(plan: Plan, measured: Plan) -> Plan:
    """Limit `plan.parallel` to the number of slots that measured best; the plan's own count is an upper limit."""
    words = {choice.name: choice for choice in measured.choices if choice.name == "parallel"}
    choices = tuple(words.get(choice.name, choice) for choice in plan.choices)
    return replace(plan, parallel=min(plan.parallel, measured.parallel), choices=choices)
