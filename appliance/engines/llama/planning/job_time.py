"""How long a job takes with so much in the cache: of a placement, from the parts of its costs. Pure."""

from __future__ import annotations

from dataclasses import replace

from appliance.engines.llama.planning.placement import PlacementJob, Resources, roofline_of, upload_of
from appliance.engines.llama.planning.roofline import costs_of
from appliance.plan import CHAT_TOKENS_IN, CHAT_TOKENS_OUT, Costs, Placement, Speed


def placement_costs(job: PlacementJob, resources: Resources, placement: Placement, *, is_pinned: bool = False) -> Costs:
    """Pinned weights, which are loaded and not mapped, are copied to a GPU at the rate of pinned memory."""
    devices = {device.id: device for device in resources.devices}
    upload = devices[placement.shares[0].gpu.id] if placement.shares else None
    if upload:
        upload = upload_of(upload, is_pinned=is_pinned)
    prompt = max(CHAT_TOKENS_IN, job.ubatch) if placement.copies_weights else CHAT_TOKENS_IN
    return costs_of(replace(roofline_of(job, resources, upload), prompt=prompt), placement, devices)


def decode_ms(costs: Costs, depth: float) -> float:
    """Of one token."""
    return costs.gpu_ms + costs.cpu_ms + costs.fixed_ms + (costs.gpu_depth_us + costs.cpu_depth_us) * depth / 1000


def prefill_ms(costs: Costs, depth: float, tokens: int) -> float:
    """Of a prompt of so many tokens, `depth` in the cache at its middle."""
    each = costs.gpu_prefill_ms + costs.cpu_prefill_ms + costs.prefill_depth_us * depth / 1000
    return tokens * each + costs.copy_ms * -(-tokens // costs.batch)


def job_ms(costs: Costs, depth: float, *, tokens_in: int = CHAT_TOKENS_IN, tokens_out: int = CHAT_TOKENS_OUT) -> float:
    return prefill_ms(costs, depth, tokens_in) + tokens_out * decode_ms(costs, depth)


def speed_of(costs: Costs, depth: float, tokens_in: int) -> Speed:
    """Of the chat job with a prompt of `tokens_in` tokens, `depth` in the cache."""
    return Speed(
        decode_tokens_per_s=1000 / decode_ms(costs, depth),
        prefill_tokens_per_s=1000 * tokens_in / prefill_ms(costs, depth, tokens_in),
        job_s=job_ms(costs, depth, tokens_in=tokens_in) / 1000,
        prompt_tokens=tokens_in,
    )
