"""The documents of a served model for /appliance/v1/… and the list of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance import __version__
from appliance.console.progress import Phase, Progress
from appliance.console.shown import quoted
from appliance.errors import VolumeError
from appliance.image_facts import EngineFacts, ImageFacts
from appliance.plan import as_document, head_of, summary
from appliance.probe import as_document as hardware_document
from appliance.profile import Profile, losses, speeds_of, speeds_told
from appliance.profile.losses import Loss
from appliance.serve.gateway.modes import modes_document, switch_document
from appliance.serve.model.needs import begin_again, needs_measuring
from appliance.serve.model.served_model import ServedModel

if TYPE_CHECKING:
    from appliance.gateway.engine.backend import ListedModel

_TUNING_WORDS = {
    "waiting": "measuring begins in the next pause between requests",
    "measuring": "the machine is being measured; the earlier plan serves meanwhile",
    "measured": "the best measured plan serves",
    "failed": "measuring found no plan, and is not tried again before the next start; the log says why",
}


def documents_of(served: ServedModel) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the documents by name; each call of one makes it anew."""
    return {
        "status": partial(_status, served),
        "hardware": partial(hardware_document, served.hardware),
        "plan": partial(_plan, served),
        "profile": partial(_profile, served),
        "tuning": partial(_tuning, served),
    }


def status_of_image(progress: Progress, image: ImageFacts, facts: EngineFacts) -> dict[str, Any]:
    """Return the first fields of every status, even before there is a model."""
    return {
        "phase": str(progress.phase),
        "message": progress.sentence(),
        "version": __version__,
        "cell": image.cell,
        "build_id": image.build_id,
        "engine": {"name": image.engine, "version": facts.version, "build": facts.build},
    }


def _status(served: ServedModel) -> dict[str, Any]:
    progress, image, facts = served.report.progress, served.inputs.image, served.inputs.facts
    plan, profile, drift = served.host.plan, served.profile, served.tuning.drift
    model = served.inputs.model
    return {
        **status_of_image(progress, image, facts),
        "model": served.name,
        "projector": model.projector.path.name if model.projector and plan and plan.launch.reads else None,
        "adapters": [{"name": adapter.path.name, "scale": adapter.scale} for adapter in model.adapters],
        "context": plan.context if plan else None,
        "chosen": summary(plan) if plan else None,
        "mode": served.settings.mode,
        "modes": modes_document(served),
        "mode_switch": switch_document(served),
        **speeds_told(plan, profile),
        "tuning": tuning_state(served),
        "quantization": served.quantizing.document(served.start.quantization),
        "allocated": asdict(served.allocated) if served.allocated else None,
        "memory_prediction_error": profile.prediction_error if profile else None,
        "slow_beside": served.slow_beside,
        "losses": [asdict(loss) for loss in losses_of(served)],
        "abilities": served.abilities.as_document() if served.abilities and served.abilities.rows else None,
        "checks": profile.checks.as_document() if profile else None,
        "watts": served.meter.watts,
        "energy": _energy(served),
        "gpu_memory": _gpu_memory(served),
        "measured_since_start": profile is not None and profile is served.measured_here,
        "profile_holds": str(drift) if drift else None,
        "standing": _profile_status(served, profile),
        "foreign_plan": served.foreign.describe() if served.foreign and profile is None else None,
        "engine_restarts": served.host.restarts,
        "engine_hangs": served.upstream.hangs if served.upstream else 0,
    }


def losses_of(served: ServedModel) -> tuple[Loss, ...]:
    """Return the speed that this machine could have and does not, as far as it is known now."""
    plan, drift = served.host.plan, served.tuning.drift
    found = [*losses.of_machine(served.gpus_at_first), *(losses.of_speed(plan, served.profile) if plan else ())]
    if served.slow_beside:
        hint = "stop the others or give the engine CPUs of its own (docker run --cpuset-cpus)"
        found.append(Loss(kind="other_programs", what=served.slow_beside, hint=hint))
    if drift is not None and drift == "stale":
        what = "the engine is slower than its profile, twice in a row"
        found.append(Loss(kind="slower_than_profile", what=what, hint="`appliance tune` measures again"))
    return (*found, *served.losses)


def _energy(served: ServedModel) -> dict[str, Any]:
    """Return joules since the first reading, and for 1,000 tokens of answers; null is unknown, and `why_unknown` says
    why."""
    last, use = served.meter.last, served.energy_use
    return {
        "joules": None if last is None or last.joules is None else round(last.joules, 1),
        "wh_per_1000_tokens": None if (wh := use.wh_per_1000_tokens) is None else round(wh, 4),
        "why_unknown": served.meter.why_unknown or None,
    }


def _gpu_memory(served: ServedModel) -> dict[str, Any] | None:
    peak = served.gpu_memory
    if peak is None:
        return None
    return {"cards": [asdict(card) for card in peak.cards], "is_whole": peak.is_whole}


def _plan(served: ServedModel) -> dict[str, Any]:
    """Return the plan that serves, with the lines that a person looks at first; empty without one."""
    plan, socket_path = served.host.plan, served.host.socket_path
    if plan is None or socket_path is None:
        return {}
    speeds = speeds_of(plan, served.profile)
    head = head_of(
        plan,
        " ".join(map(quoted, served.command(plan, socket_path).argv)),
        native=served.inputs.model.native_context,
        measured=speeds.describe() if speeds else "",
    )
    return {"head": asdict(head), **as_document(plan)}


def _profile(served: ServedModel) -> dict[str, Any]:
    """Return the profile that the plan is from; empty without one."""
    found, allocated = served.profile, served.allocated
    if found is None:
        return {}
    serving = served.host.plan
    return {**asdict(found), "key": {"id": found.key.id, "parts": found.key.parts}} | {
        "memory_prediction_error": found.prediction_error,
        **speeds_told(serving, found),
        "standing": _profile_status(served, found),
        "allocated_now": asdict(allocated) if allocated else None,
    }


def _tuning(served: ServedModel) -> dict[str, Any]:
    state = tuning_state(served)
    measured = [asdict(m) for m in served.session.measurements] if served.session else []
    return {"state": state, "message": _tuning_words(served, state), "measurements": measured}


def listed_of(served: ServedModel) -> ListedModel:
    """Return the model's row in the list of models. It is known before the model is loaded."""
    from appliance.gateway.engine.backend import ListedModel  # here: at the top it would delay the engine's start

    model, plan, name = served.inputs.model, served.host.plan, served.name
    projected = model.projector.reads if model.projector else ()
    return ListedModel(
        id=name,
        phase=served.report.progress.phase,
        aliases=tuple(alias for alias in served.aliases if alias != name),
        created_s=served.began_s,
        context=plan.context if plan else None,
        native_context=model.native_context,
        calls_tools=model.calls_tools and (plan is None or plan.launch.calls_tools),
        reasons=model.reasons and (plan is None or plan.launch.splits_reasoning),
        input_modalities=("text", *(plan.launch.reads if plan else projected)),
        is_embedding=model.is_embedding_model,
        is_reranker=model.is_reranker,
        adapters=tuple((adapter.path.name, adapter.scale) for adapter in model.adapters),
        format=model.format,
        architecture=model.architecture,
        quantization=model.label,
        size_bytes=model.file_bytes,
        parameters=model.parameters or None,
        vocabulary=model.vocabulary,
        embedding_length=model.embedding_length,
        abilities=tuple(served.abilities.by_name().items()) if served.abilities else (),
    )


def measure_now(served: ServedModel) -> tuple[int, dict[str, Any]]:
    """Measure now, since a client waits for the result. Raises ApiError if nothing will be measured."""
    served.unkept.try_now()
    state = "waiting" if begin_again(served) else tuning_state(served)
    if state in ("off", "failed"):
        from appliance.gateway.wire.api_error import ApiError  # here: no start needs it

        raise ApiError(409, f"tuning_{state}", _tuning_words(served, state))
    if state == "waiting":
        served.tuning.wanted_now.set()
    return (200 if state == "measured" else 202), {"state": state, "message": _tuning_words(served, state)}


def tuning_state(served: ServedModel) -> str:
    """Return off, waiting, measuring, measured or failed."""
    tuning = served.tuning
    if served.report.progress.phase is Phase.TUNING:
        return "measuring"
    if tuning.is_given_up:
        return "failed"
    if tuning.is_busy:
        return "measuring"
    if served.profile is not None and served.profile.goes_on_from is not None:
        return "measured"  # and more will be, in idle time
    if tuning.is_busy is not None:
        return "waiting"
    if served.settings.tune == "idle" and needs_measuring(served):
        return "waiting"
    return "off" if served.profile is None else "measured"


def _tuning_words(served: ServedModel, state: str) -> str:
    settings = served.settings
    if state == "measured" and served.tuning.why_not_best:
        return f"measured, and another plan serves: {served.tuning.why_not_best}"
    if state == "measured" and served.profile is not None and (day := served.profile.goes_on_from):
        return f"measured: {len(served.profile.plans)} plans so far; measuring goes on in idle time from {day} (UTC)"
    if state != "off":
        return _TUNING_WORDS[state]
    if served.inputs.model.is_embedding_model:
        return f"nothing is measured: the model gives {served.inputs.model.gives}, not text"
    if settings.tune == "off":
        return f"measuring is off: tune 'off' ({settings.sources.get('tune', 'default')})"
    return "another container on this volume measured meanwhile: its profile is used at the next start"


def _profile_status(served: ServedModel, profile: Profile | None) -> dict[str, Any] | None:
    """Return how the profile stands on the volume now; it may have been pinned since. None without a profile."""
    if profile is None:
        return None
    try:
        return served.standing(profile).as_document()
    except VolumeError as error:  # serving and its documents go on without the volume
        return {"problem": error.message}
