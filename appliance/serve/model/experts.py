"""The files on the volume in which a serving engine keeps and records the uses of a mixture's experts."""

from __future__ import annotations

from appliance.console.report import Report
from appliance.engines.engine import ExpertFiles
from appliance.errors import VolumeError
from appliance.start.inputs import StartInputs


def expert_files(start: StartInputs, report: Report) -> ExpertFiles | None:
    """Return the files; None if the model has no experts, the engine keeps nothing, or, with a warning, if the volume
    cannot. Raises VolumeError (50) if a trace was asked for and cannot be written."""
    settings, model = start.settings, start.inputs.model
    if not model.experts or "moe_slots" not in start.engine.settings:
        return None
    folder, digest = settings.experts_dir, start.key.parts["model"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        words = f"{folder}: {(error.strerror or str(error)).lower()}"
        if settings.trace_experts:
            source = settings.sources["trace_experts"]
            message = f"setting trace_experts is on ({source}), and nothing can be recorded: {words}"
            raise VolumeError(message, hint="make room on the volume, or take it out") from error
        report.warning("experts_not_kept", f"uses of experts are not kept over a restart: {words}")
        return None
    trace = folder / f"{model.path.stem}-{digest[:16]}.csv" if settings.trace_experts else None
    if trace:
        layers = sum(layer.expert_bytes > 0 for layer in model.stack or ()) or model.layers
        size = f"{model.expert_bytes / layers / model.experts / 1e6:.3g}"
        words = f"recording the experts of each token, no text, up to 64 MiB: {trace}; each start begins anew"
        report.info("trace_experts", f"{words}; an expert has {size} MB", expert_mb=size)
    return ExpertFiles(uses=folder / f"{digest[:16]}.uses", trace=trace)
