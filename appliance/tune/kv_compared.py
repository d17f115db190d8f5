"""Comparison of a quantized KV cache with an exact one through an engine's API, for engines without a program that
reads a text (`trials/kv_quality.py`).

An engine with an exact cache answers the prompts of `harmless.py` greedily. At the beginning of each window of an
answer it tells the most likely next tokens. An engine with the quantized cache tells them after the same tokens. What
the probabilities moved by is the Kullback-Leibler divergence, in nats per token. It is how much more the exact engine's
text would surprise the other one, so it has the limit of the check by perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, stdev

from appliance.engines.engine import LikelyClient
from appliance.plan import CacheCheck, CachePrompt, Verdict
from appliance.tune.figures.perplexity import LIMIT, t_975
from appliance.tune.harmless import ANSWER, WINDOW, compared_prompts

LIKELY = 10  # tokens that are told of each position; what is left counts as one token
PROMPTS_LEAST = 5  # with fewer the interval tells nothing
_LEAST = 1e-9  # probability
OnCheck = Callable[[CacheCheck], None]


async def answer_exactly(client: LikelyClient, check: CacheCheck, context: int, on_check: OnCheck) -> None:
    """Ask an engine with an exact cache for the answers that `check` does not have yet, and for likely tokens in them.

    `on_check` gets the check after each prompt. Raises what the client raises.
    """
    known = {each.name for each in check.prompts}
    for name, text in compared_prompts().items():
        if name in known or len(prompt := await client.tokenize(text, as_chat=True)) + ANSWER > context - 2:
            continue
        answer = (await client.complete(prompt, ANSWER, uses_cache=False, slot=0)).tokens
        likely = [await client.likely([*prompt, *answer[:at]], LIKELY) for at in range(0, len(answer), WINDOW)]
        made = CachePrompt(name=name, answer=answer, likely=tuple(tuple(each.items()) for each in likely))
        check = replace(check, prompts=(*check.prompts, made))
        on_check(check)


async def compare_likely(client: LikelyClient, check: CacheCheck, on_check: OnCheck) -> None:
    """Ask an engine with the quantized cache after the same tokens, for the prompts that have no figures yet."""
    texts = compared_prompts()
    for each in check.prompts:
        if each.nats is not None:
            continue
        prompt = await client.tokenize(texts[each.name], as_chat=True)
        nats = [
            moved_nats(dict(before), await client.likely([*prompt, *each.answer[: number * WINDOW]], LIKELY))
            for number, before in enumerate(each.likely)
        ]
        done = replace(each, nats=tuple(nats))
        check = replace(check, prompts=tuple(done if row.name == each.name else row for row in check.prompts))
        on_check(check)


def moved_nats(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the divergence of two lists of likely tokens with their log probability, in nats.

    Tokens that `before` does not name count as one. A token that `after` does not name is at most as likely as the
    least likely one that it names.
    """
    if not before or not after:
        return math.inf
    floor = min(after.values())
    pairs = [(math.exp(nats), math.exp(after.get(token, floor))) for token, nats in before.items()]
    pairs.append((max(0.0, 1 - sum(one for one, _ in pairs)), max(0.0, 1 - sum(other for _, other in pairs))))
    return max(0.0, sum(one * math.log(one / max(other, _LEAST)) for one, other in pairs if one > _LEAST))


def judged(check: CacheCheck) -> CacheCheck:
    """Return the check with its verdict, without the compared tokens. The type is harmless only if the whole 95 %
    interval over the prompts is below the limit: positions of one answer are not independent."""
    means = [fmean(each.nats) for each in check.prompts if each.nats]
    positions = sum(len(each.nats or ()) for each in check.prompts)
    if len(means) < PROMPTS_LEAST or not all(map(math.isfinite, means)):
        return replace(check, prompts=(), verdict="not checked")
    mean = fmean(means)
    high = mean + t_975(len(means) - 1) * stdev(means) / math.sqrt(len(means))
    verdict: Verdict = "harmless" if high < LIMIT else "refused"
    return replace(check, prompts=(), verdict=verdict, positions=positions, mean=mean, high=high, limit=LIMIT)
