"""The modes as clients see them: their plans, and the request to switch to another one."""

from __future__ import annotations

import json
from typing import Any

from appliance.console.progress import Phase
from appliance.serve.model.served_model import ServedModel
from appliance.settings import MODES


def modes_document(served: ServedModel) -> list[dict[str, Any]]:
    """Return a row for each mode; empty until they are known, a second or two after the model is ready."""
    serving = served.host.plan
    return [
        {
            "mode": row.mode,
            "plan": row.plan.key if row.plan else None,
            "context": row.plan.context if row.plan else None,
            "decode_tokens_per_s": row.decode_tokens_per_s,
            "prefill_tokens_per_s": row.prefill_tokens_per_s,
            "is_measured": row.is_measured,
            "is_serving": bool(row.plan and serving and row.plan.key == serving.key),
        }
        for row in served.modes.plans
    ]


def switch_document(served: ServedModel) -> dict[str, Any] | None:
    """Return the state of the last switch of modes; None without one."""
    modes = served.modes
    if modes.last is None:
        return None
    if modes.wanted is not None:
        return {"mode": modes.last, "state": "switching", "message": "its plan is being loaded"}
    if modes.failure:
        return {"mode": modes.last, "state": "failed", "message": modes.failure}
    return {"mode": modes.last, "state": "serving", "message": modes.words(modes.last)}


def switch_mode(served: ServedModel, body: bytes) -> tuple[int, dict[str, Any]]:
    """Begin to switch to the mode that the body names. Returns status and document of the answer.

    Raises ApiError for an unknown mode, and while another plan cannot be loaded.
    """
    from appliance.gateway.wire.api_error import ApiError  # here: no start needs it

    mode, modes, now = _mode_in(body), served.modes, served.settings.mode
    if why := _why_not_now(served):
        raise ApiError(409, "mode_switching", why)
    serving = served.host.plan
    answer = {"mode": mode, "plan": serving.key if serving else None, "message": modes.words(mode)}
    if mode == now:
        return 200, {**answer, "state": "serving"}
    if served.settings.nodes > 1:
        why = f"several hosts serve one plan, in mode '{now}': restart them all with --mode {mode}"
        raise ApiError(409, "mode_fixed", why)
    if served.tuning.is_busy:
        raise ApiError(409, "mode_switching", "plans are being measured: switch the mode when that has ended")
    row = modes.plan_of(mode)
    if row and row.plan is None:
        raise ApiError(409, "mode_unknown_plan", f"mode '{mode}' has no plan: {row.why_none}")
    modes.begin(mode)
    return 202, {**answer, "plan": row.plan.key if row and row.plan else None, "state": "switching"}


def _why_not_now(served: ServedModel) -> str:
    """Return why no plan can be loaded now; empty if one can."""
    progress = served.report.progress
    if served.modes.wanted is not None:
        return f"mode '{served.modes.wanted}' is being switched to: wait for its end"
    if progress.phase is not Phase.READY or not served.host.is_ready:
        return f"{progress.sentence()}: switch the mode when the model is ready"
    return ""


def _mode_in(body: bytes) -> str:
    """Return the mode that a request names. Raises ApiError (400)."""
    from appliance.gateway.wire.api_error import ApiError  # here: no start needs it

    known = ", ".join(MODES)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    mode = document.get("mode") if isinstance(document, dict) else None
    if not isinstance(mode, str):
        example = '{"mode": "speed"}'
        raise ApiError(400, "mode_required", f"the body names no mode: send {example}; the modes are {known}")
    if mode not in MODES:
        raise ApiError(400, "mode_unknown", f"mode is unknown: {mode[:100]!r}; the modes are {known}")
    return mode
