"""Comparison of greedy answers with and without speculative decoding, to see whether it is harmless.

Two runs of a right engine may differ: logits depend on the shape of a batch in their last bits, and a near-tie between
two tokens then falls the other way. After that token everything differs. So the answer of an engine without speculative
decoding is cut into windows, and each window is continued from that answer's own tokens: one difference costs one
window, never the rest of the answer.

The rate with speculative decoding is compared with that of a second run without it, over the same windows. The second
run gets the noise of batches as well: its prefix comes from prefill, while the answer's was decoded. Windows with a
near-tie differ in both runs, and the rate changes from window to window. So windows are compared in pairs
(`SpeculationCheck.chance`), which needs no common rate.
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
    """Ask an engine without speculative decoding for the prompts that `check` does not have yet.

    `on_prompt` gets the check after each prompt. Prompts that do not fit into `context` are left out. Raises what the
    client raises.
    """
    known = {each.name for each in check.prompts}
    for name, text in parse_prompts(PROMPTS.read_text(encoding="utf-8")).items():
        if name in known or len(prompt := await client.tokenize(text, as_chat=True)) + ANSWER > context - 2:
            continue
        answer = (await client.complete(prompt, ANSWER, slot=0)).tokens
        again, _, _ = await _differing(client, prompt, answer)
        check = replace(check, prompts=(*check.prompts, ComparedPrompt(name=name, answer=answer, again=again)))
        on_prompt(check)


async def answer_speculating(client: Client, check: SpeculationCheck, on_prompt: OnPrompt) -> None:
    """Ask an engine with speculative decoding to continue the windows of each prompt that it has not continued yet."""
    texts = parse_prompts(PROMPTS.read_text(encoding="utf-8"))
    for each in check.prompts:
        if each.speculating is not None:
            continue
        prompt = await client.tokenize(texts[each.name], as_chat=True)
        found, drafted, accepted = await _differing(client, prompt, each.answer)
        done = replace(each, speculating=found)
        check = replace(
            check,
            prompts=tuple(done if row is each else row for row in check.prompts),
            drafted=check.drafted + drafted,
            accepted=check.accepted + accepted,
        )
        on_prompt(check)


async def _differing(
    client: Client, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[tuple[int, ...], int, int]:
    """Return the numbers of the windows that this engine continues with other tokens, draft tokens, and accepted ones.

    From the last window on: the engine reads prompt and answer once, and every shorter prefix is in its cache then.
    """
    found: list[int] = []
    drafted = accepted = 0
    for number in reversed(range(len(answer) // WINDOW)):
        at = number * WINDOW
        done = await client.complete([*prompt, *answer[:at]], WINDOW, slot=0)
        drafted, accepted = drafted + done.drafted, accepted + done.accepted
        if tuple(done.tokens[:WINDOW]) != tuple(answer[at : at + WINDOW]):
            found.append(number)
    return tuple(sorted(found)), drafted, accepted
