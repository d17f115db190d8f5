"""Measure, and keep the profile. A start from a profile never imports this."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.console.report import Report
from appliance.engines.engine import Space
from appliance.errors import ConfigError, FatalError
from appliance.probe import gpu_uuids
from appliance.profile import Key, Profile
from appliance.profile.from_tuning import make_profile, measured_of, with_more
from appliance.serve.engine.kernels import check_kernels, check_runner_up, plan_without
from appliance.serve.model.served_model import ServedModel
from appliance.start.inputs import used_gpus
from appliance.system.detached import detached
from appliance.tune.budget import Patience
from appliance.tune.checkpoint import Partial
from appliance.tune.session import MORE_PLANS, TuningSession
from appliance.tune.trials.engine import Bench, ServingEngine


@dataclass(frozen=True, kw_only=True)
class PartialOf:
    """See `PartialStore`. Results that the volume cannot take stay in memory for the next session."""

    served: ServedModel
    key: Key

    def load(self) -> Partial:
        """Return the results of unfinished sessions."""
        return self.served.unkept.results(self.key)

    def save(self, partial: Partial) -> None:
        """Keep the results. Raises VolumeError if memory is not enough, since nothing is served."""
        self.served.unkept.keep(self.key, partial)


async def measure(served: ServedModel, *, shows_phase: bool = True, beside: Space | None = None) -> Profile:
    """Measure and return the profile, saved. It is held in memory if it is served and the volume is full.

    `beside` has the plans that fit the memory beside the engine that serves. Raises the engine's error if nothing could
    be measured.
    """
    session = served.session = _session(served, shows_phase=shows_phase, beside=beside)
    result = await session.run()
    if others := served.sharing.beside:
        result = replace(result, notes=(*result.notes, f"measured beside {', '.join(others)}"))
    before = await detached(served.store.peek, served.key) if result.tuned.disturbance else None
    gpus = gpu_uuids(served.hardware, used_gpus(served.inputs))
    profile = make_profile(result, key=served.key, settings=served.settings, gpu_uuids=gpus, before=before)
    is_kept = await served.unkept.save(profile)
    pinned = await detached(served.store.pinned, profile.key)
    _tell(profile, pinned, served.report, is_kept=is_kept)
    served.measured_here = profile
    return profile


async def measure_serving(served: ServedModel) -> None:
    """Measure the plan that serves on its own engine and keep the results for `measure`. Nothing is measured if it
    drafts, since its times depend on the text. Raises the engine's error if it fails."""
    host = served.host
    plan, socket_path, supervisor = host.plan, host.socket_path, host.supervisor
    if plan is None or socket_path is None or supervisor is None or plan.speculation is not None:
        return
    serving = ServingEngine(
        plan=plan,
        command=served.command(plan, socket_path),
        supervisor=supervisor,
        load_s=host.load_s,
        allocated=served.allocated,
    )
    served.session = _session(served, shows_phase=False, serving=serving)
    await served.session.measure_serving()


async def measure_more(
    served: ServedModel, profile: Profile, *, context: int | None = None, beside: Space | None = None
) -> Profile:
    """Measure more for the mode that is set, if it needs a context length that no measured plan has. With `context`,
    measure one plan of that length.

    Returns the profile with the additional plans, saved as `measure` does.
    """
    report, mode, id_ = served.report, served.settings.mode, profile.key.id
    session = served.session = _session(served, shows_phase=False, beside=beside)
    words = f"profile {id_} was measured for mode '{profile.mode}': up to {MORE_PLANS} more for '{mode}'"
    if context is not None:
        words = f"needles were lost in every measured context, and {context:,} tokens hold: measuring a plan with that"
    report.info("tune_more", words, profile=id_)
    found = await session.widen(measured_of(profile), context)
    widened = with_more(profile, found, mode if context is None else None)
    await served.unkept.save(widened)
    count = len(widened.plans) - len(profile.plans)
    what = f"for mode '{mode}'" if context is None else f"with a context of {context:,}"
    report.info("tuned_more", f"measured {count} more {what}", profile=id_)
    served.measured_here = widened
    return widened


async def measure_alone(served: ServedModel) -> None:
    """Measure without serving.

    Raises ConfigError (10) for a model that makes no text, for a pinned profile, which would stay as it is, and while
    another container measures for the same key: each would disturb the other.
    """
    model = served.inputs.model
    served.unkept.is_enough = False
    if model.is_embedding_model:
        message = f"nothing can be measured: {model.title} gives {model.gives}, not text"
        raise ConfigError(message, hint="serve it: its plan is the prediction")
    _refuse_pinned(served)
    async with served.measuring() as is_ours:
        if not is_ours:
            message = "another container on this volume is measuring for the same key"
            raise ConfigError(message, hint="wait for it; its profile will serve both")
        await check_kernels(served)
        while True:
            await check_runner_up(served)
            try:
                await measure(served)
            except FatalError as error:
                await plan_without(served, served.inputs.kernels.variant, error)
            else:
                return


def _session(
    served: ServedModel, *, shows_phase: bool, beside: Space | None = None, serving: ServingEngine | None = None
) -> TuningSession:
    start, settings = served.start, served.settings
    # Without a phase an engine serves: it is idle time, or a client waits for the result.
    patience = Patience(loads_a_day=settings.loads_a_day, waits=not served.tuning.wanted_now.is_set())
    return TuningSession(
        start.inputs,
        Bench(engine=start.engine, install=start.install, socket_path=served.trial_socket, serving=serving),
        space=start.space,
        store=PartialOf(served=served, key=start.key),
        watch=served.watch,
        report=served.report,
        shows_phase=shows_phase,
        beside=beside,
        patience=None if shows_phase else patience,
    )


def _tell(profile: Profile, pinned: Profile | None, report: Report, *, is_kept: bool) -> None:
    if pinned is not None:
        words = f"profile {pinned.key.id} is pinned and stays the one used; `appliance profiles unpin` ends that"
        report.warning("profile_pinned", words, profile=pinned.key.id)
    if profile.disturbance:
        stays = "" if is_kept else ", and the profile that is there stays"
        words = f"something else was at work while this was measured: {profile.disturbance}; provisional{stays}"
        report.warning("provisional", words)
    words = f"chose {profile.plan.key} in {profile.seconds:.0f} s: {profile.speed}; stopped: {profile.stopped_by}"
    more = profile.goes_on_from
    words += f"; measuring goes on in idle time from {more} (UTC)" if more else ""
    report.info("tuned", words, profile=profile.key.id, stopped_by=profile.stopped_by, goes_on_from=more)


def _refuse_pinned(served: ServedModel) -> None:
    """Raise ConfigError (10) for a pinned profile before the budget is spent.

    Another build's pinned profile is only warned of: the new one is kept under its own key.
    """
    store, key = served.store, served.key
    pinned = store.pinned(key)
    if store.stays(key):
        message = f"profile is pinned, and what is measured would not be kept: {key.id}"
        raise ConfigError(message, hint=f"`appliance profiles unpin {key.id}` allows a new measurement")
    if pinned is not None:
        words = (
            f"profile {pinned.key.id} of build {pinned.key.parts.get('build')} is pinned: what is measured is kept "
            "beside it, and used when `appliance profiles unpin` has ended that"
        )
        served.report.warning("profile_pinned", words, profile=pinned.key.id)
