"""Comparison of greedy answers with and without speculative decoding, to see whether it is harmless.

Two runs of a right engine may differ: logits depend on the shape of a batch in their last bits, and a near-tie between
two tokens then falls the other way. After that token everything differs. So the answer of an engine without speculative
decoding is cut into windows, and each window is continued from that answer's own tokens: one difference costs one
window, never the rest of the answer.

Two more engines continue the windows: one without speculative decoding, and one with it. Both get the same requests in
the same order, so the noise of batches is the same in both, except for the batches that check draft tokens. A window
with a near-tie is likely to differ in both runs. So windows are compared in pairs (`SpeculationCheck.chance`), which
needs no rate that all windows have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from appliance.engines.engine import Client
from appliance.plan import ComparedPrompt, SpeculationCheck
from appliance.tune.speculate import PROMPTS, parse_prompts

WINDOW = 16
ANSWER = 11 * WINDOW  # tokens of an answer: 2,112 for the dozen prompts
OnPrompt = Callable[[SpeculationCheck], None]


async def answer_plainly(client: Client, check: SpeculationCheck, context: int, on_prompt: OnPrompt) -> None:
    """Ask an engine without speculative decoding for the answers that `check` does not have yet.

    `on_prompt` gets the check after each prompt. Prompts that do not fit into `context` are left out. Raises what the
    client raises.
    """
    known = {each.name for each in check.prompts}
    for name, text in compared_prompts().items():
        if name in known or len(prompt := await client.tokenize(text, as_chat=True)) + ANSWER > context - 2:
            continue
        done = await client.complete(prompt, ANSWER, uses_cache=False, slot=0)
        check = replace(check, prompts=(*check.prompts, ComparedPrompt(name=name, answer=done.tokens)))
        on_prompt(check)


async def continue_windows(client: Client, check: SpeculationCheck, on_prompt: OnPrompt, *, speculates: bool) -> None:
    """Continue the windows of each prompt that an engine of this kind has not continued yet."""
    for each in check.prompts:
        if (each.speculating if speculates else each.again) is not None:
            continue
        prompt = await client.tokenize(compared_prompts()[each.name], as_chat=True)
        found, drafted, accepted = await _differing(client, prompt, each.answer)
        done = replace(each, speculating=found) if speculates else replace(each, again=found)
        check = replace(
            check,
            prompts=tuple(done if row.name == each.name else row for row in check.prompts),
            drafted=check.drafted + drafted,
            accepted=check.accepted + accepted,
        )
        on_prompt(check)


def compared_prompts() -> dict[str, str]:
    """Return the prompts of the comparison by name."""
    return parse_prompts(PROMPTS.read_text(encoding="utf-8"))


async def _differing(client: Client, prompt: Sequence[int], answer: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Return the numbers of the windows that this engine continues with other tokens, draft tokens, and accepted ones.

    From the last window on: the engine reads prompt and answer once, and every shorter prefix is in its cache then.
    """
    found: list[int] = []
    drafted = accepted = 0
    windows = len(answer) // WINDOW
    for number in reversed(range(windows)):
        at = number * WINDOW
        # Without the cache at first: what an earlier prompt left there would change the shape of the batch.
        uses_cache = number < windows - 1
        done = await client.complete([*prompt, *answer[:at]], WINDOW, uses_cache=uses_cache, slot=0)
        drafted, accepted = drafted + done.drafted, accepted + done.accepted
        if tuple(done.tokens[:WINDOW]) != tuple(answer[at : at + WINDOW]):
            found.append(number)
    return tuple(sorted(found)), drafted, accepted
