"""The plan that a start serves: from a profile, from measuring, or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from appliance.engines.engine import Inputs
from appliance.errors import FatalError
from appliance.plan import Plan
from appliance.profile import Picked, Profile, pick
from appliance.profile.at_start import ProfileState, StartAction, StartDecision, at_start, is_due
from appliance.profile.starting import first_plan
from appliance.serve.engine.kernels import check_runner_up, plan_without
from appliance.serve.engine.load import launch
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached


def start_from_profile(served: ServedModel) -> None:
    """Launch the engine at once if a profile holds and its kernels were checked before; else do nothing."""
    profile = served.store.load(served.key)
    if profile is not None:
        served.memory_kills.judge(served.start, profile)
    served.guard.begin(_inputs_for(served, profile), profile.kv_checks if profile else ())
    if served.guard.is_checking:
        return
    if profile is not None and (start := _at_start(served, profile, may_measure=True)).action is StartAction.USE:
        _report(served, start)
        launch(served, use_profile(served, profile))


def _inputs_for(served: ServedModel, profile: Profile | None) -> Inputs:
    """Return the inputs with the kernels to check: those of the profile's plan."""
    runner_up = served.inputs.kernels.candidate
    is_of_profile = runner_up and profile and profile.plan.cpu_variant == runner_up.variant
    return served.inputs.with_kernels(runner_up) if runner_up and is_of_profile else served.inputs


async def choose_plan(served: ServedModel) -> Plan:
    """Choose the plan, and measure first if the settings ask for it.

    Another container that measures for the same key is not waited for. A CPU variant that dies while it is measured is
    replaced by the next.
    """
    while True:
        try:
            return await _choose_plan(served)
        except FatalError as error:
            await plan_without(served, served.inputs.kernels.variant, error)


async def _choose_plan(served: ServedModel) -> Plan:
    store, model, report = served.store, served.inputs.model, served.report
    profile = await detached(store.load, served.key)
    if profile is None and (changed := await detached(store.why_unused, served.key, model.path.name)):
        report.info("profile_unused", f"no profile for this start; since the last one changed: {changed}")
    if model.is_embedding_model and served.settings.tune != "off":
        report.info("tune_off", f"the model gives {model.gives}, not text: serving the prediction")
        return served.space.best
    async with served.measuring() as is_ours:
        profile = await detached(store.load, served.key)
        judged = partial(_at_start, served, profile, may_measure=is_ours)
        start = await detached(judged)
        if start.action is StartAction.WATCH:
            start = await detached(partial(judged, busy=await served.what_else_works()))
        _report(served, start)
        if start.action is StartAction.MEASURE:
            from appliance.serve.engine.measure import measure  # here: a start from a profile never needs it

            await check_runner_up(served)
            served.profile = await measure(served)
            return served.profile.plan
    return await _first_plan(served) if profile is None else use_profile(served, profile)


async def _first_plan(served: ServedModel) -> Plan:
    """Return what was measured for this class of machine before, else the prediction."""
    served.foreign = await detached(first_plan, served.store, served.key, served.settings.mode, served.space)
    if served.foreign is None:
        return served.space.predicted
    words = f"serving {served.foreign.plan.key}, foreign until it is measured here: {served.foreign.describe()}"
    served.report.info("plan_foreign", words, profile=served.foreign.profile.key.id)
    return served.foreign.plan


def use_profile(served: ServedModel, profile: Profile) -> Plan:
    """Return the best measured plan that fits the memory free now; the prediction if none does."""
    served.profile = profile
    report, mode = served.report, served.settings.mode
    build_id = served.inputs.image.build_id
    if (build := profile.key.parts.get("build")) != build_id:
        words = f"profile {profile.key.id} is pinned: used although build: {build} -> {build_id}"
        report.info("profile_pinned", words, profile=profile.key.id)
    report.info("profile_used", f"profile {profile.key.id}: {profile.speed}", profile=profile.key.id)
    picked = pick(profile, mode, served.space)
    _report_passed_over(served, picked.passed_over if isinstance(picked, Picked) else picked)
    if isinstance(picked, Picked):
        if not picked.is_best or mode != profile.mode:
            words = f"serving {picked.plan.key}: {picked.why}{_measured_for(served, profile)}"
            report.info("plan_picked", words, mode=mode)
        return picked.plan
    report.warning("plan_predicted", "nothing that was measured fits now: serving the prediction")
    return served.space_of_profile.predicted


def _at_start(
    served: ServedModel, profile: Profile | None, *, may_measure: bool, busy: str | None = None
) -> StartDecision:
    state = None
    if profile is not None:
        id_ = profile.key.id
        due = is_due(profile.created, disturbed_times=profile.disturbed_times, now=datetime.now(UTC))
        state = ProfileState(
            id=id_,
            stale=served.store.why_stale(profile),
            provisional=profile.disturbance if due else None,
            busy=busy,
            is_pinned=served.store.is_pinned(id_),
        )
    return at_start(state, tune=served.settings.tune, may_measure=may_measure)


def _report(served: ServedModel, start: StartDecision) -> None:
    if start.words:
        (served.report.warning if start.is_warning else served.report.info)(start.event, start.words)


def _measured_for(served: ServedModel, profile: Profile) -> str:
    if served.settings.mode in (profile.mode, *profile.other_modes):
        return ""
    tune = served.settings.tune
    words = f"; chosen among what was measured for mode '{profile.mode}'"
    return words if tune == "idle" else f"{words}, and tune '{tune}' measures no more"


def _report_passed_over(served: ServedModel, lacking: Sequence[str]) -> None:
    if not lacking:
        return
    from appliance.probe.load.holders import who_holds  # here: few starts are short of memory

    for words in lacking:
        served.report.warning("plan_passed_over", f"{words}; {who_holds(served.hardware)}")
