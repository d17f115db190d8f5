"""Time of a job on a placement, at a given depth of the KV cache. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.placement.placement import PlacementJob, Resources, roofline_of, upload_of
from appliance.engines.llama.planning.placement.roofline import costs_of
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Costs, Placement, Speed


def placement_costs(
    job: PlacementJob, resources: Resources, placement: Placement, *, is_pinned: bool = False, prompt: int = 0
) -> Costs:
    """Return the costs of a placement.

    `is_pinned`: weights in host memory are pinned, and copied to a GPU at the rate of pinned memory. `prompt` is the
    length of the prompt in tokens; 0: that of the chat job.
    """
    devices = {device.id: device for device in resources.devices}
    upload = devices[placement.shares[0].gpu.id] if placement.shares else None
    if upload:
        upload = upload_of(upload, is_pinned=is_pinned)
    prompt = prompt or (max(CHAT_TOKENS_IN, job.ubatch) if placement.copies_weights else CHAT_TOKENS_IN)
    return costs_of(replace(roofline_of(job, resources, upload), prompt=prompt), placement, devices)


def job_ms(costs: Costs, depth: float, *, tokens_in: int = CHAT_TOKENS_IN, tokens_out: int = CHAT_TOKENS_OUT) -> float:
    return costs.prefill_ms(tokens_in, depth) + tokens_out * costs.decode_ms(depth)


def speed_of(costs: Costs, depth: float, tokens_in: int) -> Speed:
    """Return the speed in a chat job with a prompt of `tokens_in` tokens, at `depth` tokens in the KV cache."""
    return Speed(
        decode_tokens_per_s=1000 / costs.decode_ms(depth),
        prefill_tokens_per_s=1000 * tokens_in / costs.prefill_ms(tokens_in, depth),
        job_s=job_ms(costs, depth, tokens_in=tokens_in) / 1000,
        prompt_tokens=tokens_in,
    )
