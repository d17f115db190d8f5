"""Measures in idle time what a model loses by fewer experts a token (--experts-used), once for each profile's key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.abilities.expert_loss import KeptExpertLoss
from appliance.errors import FatalError
from appliance.quantize.loss import measure_loss
from appliance.serve.background.idle_text import IdleText
from appliance.serve.model.served_model import ServedModel
from appliance.system.detached import detached

if TYPE_CHECKING:
    from appliance.gateway.clients.traffic import Traffic  # for types only: it takes half a second to import


async def measure_expert_loss(served: ServedModel, traffic: Traffic) -> None:
    """Measure and keep the loss, if it is not kept yet. A failure is a warning, and the next start tries again."""
    report, count = served.report, served.settings.experts_used
    kept = KeptExpertLoss(served.settings.profiles_dir, served.key, lambda words: report.warning("experts_loss", words))
    if await detached(kept.load) is not None:
        return
    text, model = IdleText(served, traffic), served.inputs.model
    try:
        await text.until_quiet()
        exact, fewer = await text.run_of(model, experts_used=None), await text.run_of(model)
        loss = await measure_loss(exact, fewer, text.pauses)
        if loss.is_finite:
            await detached(kept.save, loss)
    except FatalError as error:
        report.warning("experts_loss", f"the loss by {count} experts a token was not measured: {error.message}")
        return
    if not loss.is_finite:
        report.warning("experts_loss", f"with {count} experts a token the probabilities of a text are no numbers")
        return
    report.info("experts_loss", f"{count} experts a token instead of {model.experts_used}: {loss.describe()}")
