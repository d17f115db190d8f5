"""Compares greedy answers of two builds with their logprobs. The comparison is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from appliance.host.court.judge import Verdict
from appliance.host.court.replay import Build
from appliance.values import dataclass

TOKENS, ALTERNATIVES = 48, 5
# Natural texts without a choice of words by us: the model continues them.
PROMPTS = (
    "The three states of matter are solid, liquid and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Dear Mrs. Miller,\n\nthank you for your letter of 3 May. We are sorry to hear that",
    "Q: What is 17 + 25?\nA: 42\nQ: What is 31 + 48?\nA:",
    'The file config.json contains:\n{"name": "server", "port": 8080, "hosts": [',
    "Die Hauptstadt von Frankreich ist Paris. Die Hauptstadt von Italien ist",
)
# Two right builds differ where two tokens are nearly as likely, and by rounding. `benchmarks/court.py --answers` shows
# both figures for other kernels and other types of the KV cache.
CLEAR_NATS = 0.5  # the old build held the new one's token for e^0.5 times less likely than its own
MOST_CLEAR = 1  # prompts of the six
MOST_MEAN_NATS = 0.25


@dataclass(frozen=True, kw_only=True)
class Token:
    text: str
    logprob: float
    others: Mapping[str, float]  # the likeliest tokens with their logprobs, this one included


@dataclass(frozen=True, kw_only=True)
class Answers:
    """`clear` counts the prompts whose answers part at a token that the old build held for clearly worse.

    `mean_nats` is the mean difference of the logprobs while both answers are the same; None without a common token.
    """

    prompts: int
    same: int
    clear: int
    mean_nats: float | None
    why_not: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.why_not:
            return Verdict.NOT_DECIDED
        is_off = self.clear > MOST_CLEAR or (self.mean_nats is None or self.mean_nats > MOST_MEAN_NATS)
        return Verdict.LOST if is_off else Verdict.AS_GOOD


def ask(build: Build) -> tuple[tuple[Token, ...], ...]:
    """Return the answers to all prompts. Raises FatalError."""
    return tuple(_answer(build, prompt) for prompt in PROMPTS)


def _answer(build: Build, prompt: str) -> tuple[Token, ...]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "logprobs": ALTERNATIVES, "seed": 1}
    return tuple(token for event in build.ask(body) for token in tokens_of(event))


def tokens_of(event: Mapping[str, Any]) -> tuple[Token, ...]:
    """Return the tokens of one event, with the logprobs in either of the forms of OpenAI's API."""
    found: list[Token] = []
    for choice in event.get("choices") or ():
        told = choice.get("logprobs") or {}
        for each in told.get("content") or ():
            others = {other["token"]: other["logprob"] for other in each.get("top_logprobs") or ()}
            found.append(Token(text=each["token"], logprob=each["logprob"], others=others))
        for text, logprob, others in zip(
            told.get("tokens") or (), told.get("token_logprobs") or (), told.get("top_logprobs") or (), strict=False
        ):
            found.append(Token(text=text, logprob=logprob, others=others or {}))
    return tuple(found)


def compare(old: Sequence[Sequence[Token]], new: Sequence[Sequence[Token]]) -> Answers:
    """Compare the answers to the same prompts. Without any logprobs nothing is decided."""
    if not any(old):
        return Answers(prompts=len(old), same=0, clear=0, mean_nats=None, why_not="the engine tells no logprobs")
    same = clear = 0
    differences: list[float] = []
    for ours, theirs in zip(old, new, strict=True):
        common = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.text != b.text),
            min(len(ours), len(theirs)),
        )
        differences += [abs(a.logprob - b.logprob) for a, b in zip(ours[:common], theirs[:common], strict=True)]
        if common == len(ours) == len(theirs):
            same += 1
        elif common == len(ours) or common == len(theirs):
            clear += 1  # one ended, and the other went on
        else:
            mine, other = ours[common], theirs[common].text
            lost = mine.logprob - mine.others.get(other, min(mine.others.values(), default=mine.logprob - CLEAR_NATS))
            clear += lost >= CLEAR_NATS
    mean_nats = fmean(differences) if differences else None
    return Answers(prompts=len(old), same=same, clear=clear, mean_nats=mean_nats)
