"""Measurement of speculative decoding: whether it pays on this machine with this model, and with how many draft tokens.

No engine so far lets a request change the number of draft tokens, so every number needs a start of its own. Each start
gets the same prompts with the same seeds and the model's own sampling. Draft tokens do not change what is sampled, so
the answers are identical, token for token, and times are compared in pairs. A start gets each prompt only once: n-grams
keep what they have seen, so they would know a repeated answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.engines.engine import Client, Completion, Space
from appliance.errors import ConfigError, EngineError, EngineNotReadyError, ModelDoesNotFitError
from appliance.plan import SIZES, SPECULATION_GOALS, UNMEASURED, Kind, Plan, Speculation, SpeculationGoal
from appliance.tune.figures.acceptance import SpeculationResult, chosen, is_looping, next_tokens
from appliance.tune.figures.measurement import TRIES
from appliance.tune.trials.engine import Bench, in_time, unless_stalled
from appliance.tune.trials.run_trial import Step
from appliance.tune.tuner import Tuned

PROMPTS = Path(__file__).with_name("prompts.txt")
WARM = "Name three colours."  # warm-up prompt, different from all others; its time is not used
WARM_TOKENS = 8
TOKENS_LEAST, TOKENS_MOST = 64, 128  # length of an answer; n-grams draft only after 24 known tokens in a row
PROMPT_TOKENS = 150  # approximate length of a prompt
PROMPTS_LEAST, PROMPTS_AIMED = 3, 6  # three are one of each kind: a question, an edit, a summary
MADE_LEAST = 8  # an answer that ended by itself counts only from this length on
ROUNDS = 8.0  # the answers of one start take this part of the time: there are four or five starts, loads and prompts
DOING = "speculative decoding was measured"  # purpose, for error messages
GAINS_NOTHING: Mapping[SpeculationGoal, str] = {
    "auto": "speculative decoding gains nothing",
    "stable": "speculative decoding gains nothing without making some kind of request slower",
    "fast": "speculative decoding gains nothing for any kind of request",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to one prompt. `made` is the number of generated tokens after the first, which prefill yields."""

    name: str
    made: int
    ms: float
    drafted: int
    accepted: int
    is_looping: bool

    @property
    def counts(self) -> bool:
        return self.made >= MADE_LEAST and not self.is_looping

    @property
    def request(self) -> str:
        """Kind of the request, such as "edit" for "edit: parser"."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Result of one start. `kind` is None for the plan without draft tokens. If `error` is set there are no answers."""

    kind: Kind | None
    tokens: int
    tokens_each: int = 0
    answers: tuple[Answer, ...] = ()
    seconds: float = 0.0
    error: str | None = None

    def describe(self) -> str:
        """Return words such as "ngram 8: 41.2 ms a token, 31 of 40 draft tokens accepted, 12 answers"."""
        what = f"{self.kind} {self.tokens}" if self.kind else "no draft tokens"
        if self.error:
            return f"{what}: {self.error}"
        drafted, accepted = (sum(getattr(a, name) for a in self.answers) for name in ("drafted", "accepted"))
        looped = sum(a.is_looping for a in self.answers)
        drafts = f", {accepted} of {drafted} draft tokens accepted" if self.kind else ""
        loops = f", {looped} of them looping" if looped else ""
        return f"{what}: {ms_per_token(self.answers):.1f} ms a token{drafts}, {len(self.answers)} answers{loops}"


def ms_per_token(answers: Sequence[Answer]) -> float:
    return sum(a.ms for a in answers) / max(1, sum(a.made for a in answers))


def compared(base: Tried, other: Tried) -> tuple[float, SpeculationResult] | None:
    """Return the ms per token without draft tokens, and the result of `other`, over the same prompts. None if no prompt
    has an answer that counts in both."""
    before = {answer.name: answer for answer in base.answers if answer.counts}
    after = [answer for answer in other.answers if answer.counts and answer.name in before]
    made = sum(answer.made for answer in after)
    if not made:
        return None
    kinds_of = dict.fromkeys(answer.request for answer in after)
    by_kind = {kind: [a for a in after if a.request == kind] for kind in kinds_of}
    return ms_per_token([before[a.name] for a in after]), SpeculationResult(
        tokens=other.tokens,
        ms=ms_per_token(after),
        drafted=sum(a.drafted for a in after) / made,
        accepted=sum(a.accepted for a in after) / made,
        by_kind=tuple(
            (kind, ms_per_token(own) / ms_per_token([before[a.name] for a in own])) for kind, own in by_kind.items()
        ),
    )


async def choose_speculation(
    plan: Plan,
    bench: Bench,
    space: Space,
    *,
    requested: str,
    left_s: Callable[[], float],
    ask_s: float,
    on_step: Callable[[Step], None],
    kept: Sequence[Tried] = (),
    on_result: Callable[[Tried], None] = lambda _: None,
) -> tuple[Speculation | None, str, list[Tried]]:
    """Return the best speculative decoding, the reason, and the results. None if decoding without it is as fast. A kind
    that the user asked for is returned in any case, with the best number of draft tokens that was measured.

    `plan` has no speculative decoding; `space.speculating(plan, …)` is the plan to serve. `requested` is the setting.
    `left_s` returns the seconds that are left, infinite without a time limit; 0 ends the choice with what was measured.
    The answers of the first start take about `ask_s`.
    `on_result` gets each start's result, failures included. `kept` are results of an interrupted choice for the same
    plan. They replace starts, even if no time is left; a failure does so only if it is there TRIES times. If the user
    asked for a kind, failures are not kept, since they end the tuning.

    Raises ConfigError if the kind that was asked for is impossible, ModelDoesNotFitError if it does not fit, and the
    engine's error if the start without draft tokens fails.
    """
    offers = space.offers()
    tried = [offer.kind for offer in offers if offer.is_tried]
    if not tried:
        reasons = dict.fromkeys(offer.reason for offer in offers)
        return None, f"nothing to draft with: {'; '.join(reasons)}", []
    kind_requested = tried[0] if requested == tried[0] else None
    goal = next((goal for goal in SPECULATION_GOALS if goal == requested), SPECULATION_GOALS[0])
    run = _Run(plan, bench, space, goal, on_step=on_step, left_s=left_s, ask_s=ask_s, kept=kept, on_result=on_result)
    await run.measure_base(is_requested=kind_requested is not None)
    fixed = {offer.kind: offer.tokens for offer in offers}
    for kind in tried:
        await run.measure_kind(kind, fixed[kind], is_requested=kind == kind_requested)
    if kind_requested is not None:
        return *run.of_requested(kind_requested, fixed[kind_requested]), run.tried
    await run.measure_base_again()
    return *run.of_fastest(), run.tried


def least_s(tuned: Tuned) -> float:
    """Return the expected seconds of one start with the fewest prompts, from the plan's measured speed."""
    curve = tuned.chosen.scored.curve
    load_s = max((m.load_s for m in tuned.measurements if m.points), default=0.0)
    depth = PROMPT_TOKENS + TOKENS_LEAST
    return load_s + PROMPTS_LEAST * (curve.prefill_s(0, PROMPT_TOKENS) + curve.decode_ms(depth) * TOKENS_LEAST / 1000)


class _Run:
    """State of one choice: results so far and the time that is left."""

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        space: Space,
        goal: SpeculationGoal,
        *,
        on_step: Callable[[Step], None],
        left_s: Callable[[], float],
        ask_s: float,
        kept: Sequence[Tried],
        on_result: Callable[[Tried], None],
    ) -> None:
        self._plan, self._bench, self._on_step, self._on_result = plan, bench, on_step, on_result
        self._space, self._goal = space, goal
        self._kept = list(kept)
        self._left_s, self._ask_s = left_s, ask_s
        self._base: Tried | None = None
        self._results: dict[Kind, list[SpeculationResult]] = {}
        self._base_ms = 0.0
        self.tried: list[Tried] = []

    def _has_time(self) -> bool:
        return max((t.seconds for t in self.tried), default=0.0) < self._left_s()

    def _estimated(self, kind: Kind, tokens: int) -> Speculation:
        return self._space.speculation(self._plan, kind, tokens)

    def _take(self, kind: Kind | None, tokens: int) -> Tried | None:
        """Remove and return the kept result of such a start, or None."""
        alike = [t for t in self._kept if (t.kind, t.tokens) == (kind, tokens)]
        found = next((t for t in alike if t.error is None), alike[-1] if len(alike) >= TRIES else None)
        if found is not None:
            self._kept.remove(found)
        return found

    async def measure_base(self, *, is_requested: bool) -> None:
        self._base = await self._without(has_time=self._left_s() > 0, is_requested=is_requested)
        if self._base is not None:
            self.tried.append(self._base)
            self._base_ms = ms_per_token([a for a in self._base.answers if a.counts])

    async def _without(self, *, has_time: bool, is_requested: bool = False) -> Tried | None:
        found = self._take(None, 0)
        if found is None and not has_time:
            return None
        if found is not None and found.error is not None:
            raise EngineNotReadyError(found.error)
        try:
            return found or await self._measured(self._plan, ask_s=0.0 if self._base else self._ask_s)
        except EngineError as error:
            if not is_requested:
                self._on_result(Tried(kind=None, tokens=0, error=error.message))
            raise

    async def measure_base_again(self) -> None:
        """Measure the plan without draft tokens again and use each answer's shorter time: a machine that became faster
        meanwhile would look like a gain."""
        if self._base is None or self._fastest() is None:
            return
        again = await self._without(has_time=self._has_time())
        if again is None:
            return
        self.tried.append(again)
        times = {answer.name: answer.ms for answer in again.answers}
        answers = tuple(replace(a, ms=min(a.ms, times.get(a.name, a.ms))) for a in self._base.answers)
        self._base = replace(self._base, answers=answers)
        self._base_ms = ms_per_token([a for a in answers if a.counts])
        self._results = {kind: self._compared(kind) for kind in self._results}

    async def measure_kind(self, kind: Kind, fixed: int | None, *, is_requested: bool) -> None:
        """Measure numbers of draft tokens one after another, as `next_tokens` proposes, or the `fixed` number only. A
        failed start ends its kind."""
        rates = self._results.setdefault(kind, [])
        sizes = SIZES[kind] if fixed is None else (fixed,)
        while self._base is not None and self._base_ms:
            tokens = next_tokens(self._base_ms, rates, sizes)
            if not tokens:
                return
            found = self._take(kind, tokens)
            if found is None and not self._has_time():
                return
            found = found or await self._measured_with(kind, tokens, is_requested=is_requested)
            if found is None:
                return
            self.tried.append(found)
            if found.error:
                return
            if is_requested and kind != "ngram" and not any(a.drafted for a in self.tried[-1].answers):
                message = f"engine drafts nothing with speculation '{kind}': {self._estimated(kind, tokens).describe()}"
                raise ConfigError(message, hint="the engine's log says why; use --speculation auto to serve without it")
            before = len(rates)
            rates[:] = self._compared(kind)
            if len(rates) == before:
                return

    async def _measured_with(self, kind: Kind, tokens: int, *, is_requested: bool) -> Tried | None:
        try:
            return await self._measured(self._space.speculating(self._plan, self._estimated(kind, tokens)))
        except (EngineError, ModelDoesNotFitError) as error:
            if is_requested:
                raise
            failed = Tried(kind=kind, tokens=tokens, error=error.message)
            self._on_result(failed)
            return failed

    async def _measured(self, plan: Plan, ask_s: float = 0.0) -> Tried | None:
        """Measure one start and report it. Returns None if the time was up before it ended."""
        work = measure_speculation(plan, self._bench, ask_s=ask_s, like=self._base, on_step=self._on_step)
        found = await in_time(self._left_s(), work)
        if found is not None:
            self._on_result(found)
        return found

    def _compared(self, kind: Kind) -> list[SpeculationResult]:
        """Return the results of a kind. Times are relative to the same prompts without draft tokens, multiplied by the
        mean time without, so that they are comparable."""
        pairs = [compared(self._base, t) for t in self.tried if self._base is not None and t.kind == kind]
        return [replace(rate, ms=rate.ms / base_ms * self._base_ms) for base_ms, rate in filter(None, pairs)]

    def _fastest(self) -> tuple[Kind, SpeculationResult] | None:
        """Return the fastest kind and result, if it meets the goal; else None."""
        every = [(kind, rate) for kind, rates in self._results.items() for rate in rates]
        best = chosen(self._base_ms, [rate for _, rate in every], self._goal)
        return next((pair for pair in every if pair[1] is best), None)

    def of_fastest(self) -> tuple[Speculation | None, str]:
        fastest = self._fastest()
        if fastest is not None:
            kind, rate = fastest
            speculation = self._estimated(kind, rate.tokens)
            return speculation, f"{speculation.describe()}: {self._figures(rate)}"
        if self._base is None:
            return None, "no time was left to measure what speculative decoding gains"
        if not self._base_ms:
            return None, f"no answer could be used for measuring: {self.tried[0].describe()}"
        seen = [(kind, min(rates, key=lambda rate: rate.ms)) for kind, rates in self._results.items() if rates]
        figures = "; ".join(f"{kind} {rate.tokens}: {self._figures(rate)}" for kind, rate in seen)
        failed = "; ".join(t.describe() for t in self.tried if t.error)
        words = "; ".join(filter(None, (figures, failed)))
        if not words:
            return None, "no time was left to measure what speculative decoding gains"
        return None, f"{GAINS_NOTHING[self._goal]}: {words}"

    def of_requested(self, kind: Kind, fixed: int | None) -> tuple[Speculation, str]:
        rates = self._results.get(kind, [])
        best = min(rates, key=lambda rate: rate.ms, default=None)
        if best is None:
            speculation = self._estimated(kind, fixed or UNMEASURED[kind])
            return speculation, f"asked for, {speculation.describe()}; its gain was not measured"
        speculation = self._estimated(kind, best.tokens)
        return speculation, f"asked for, {speculation.describe()}: {self._figures(best)}"

    def _figures(self, rate: SpeculationResult) -> str:
        """Return words such as "31.0 ms a token, 41.2 without: 25% shorter (chat +1%, edit -44%); 0.52 draft tokens per
        token, 78% accepted"."""
        share = 1 - rate.ms / self._base_ms
        words = f"{rate.ms:.1f} ms a token, {self._base_ms:.1f} without: "
        words += f"{abs(share):.0%} {'shorter' if share > 0 else 'longer'}"
        if len(rate.by_kind) > 1:
            words += f" ({', '.join(f'{kind} {of - 1:+.0%}' for kind, of in rate.by_kind)})"
        if not rate.drafted:
            return f"{words}; nothing was drafted"
        return f"{words}; {rate.drafted:.2f} draft tokens per token, {rate.acceptance:.0%} accepted"


async def measure_speculation(
    plan: Plan,
    bench: Bench,
    *,
    ask_s: float,
    like: Tried | None,
    on_step: Callable[[Step], None],
) -> Tried:
    """Load the plan, unless it serves, and ask several prompts: those of `like` with answers as long, else as many as
    fit into `ask_s`. Raises the engine's error if it fails."""
    began = time.monotonic()
    drafts = f"up to {plan.speculation.tokens} draft tokens" if plan.speculation else "no draft tokens"
    on_step(Step(plan=plan, what=f"loading, {drafts}"))
    async with bench.opened(plan) as opened, bench.engine.client(opened.command, doing=DOING) as client:
        asking = _ask(
            _Asker(client), plan, ask_s, like, lambda name: on_step(Step(plan=plan, what=f"answering {name}"))
        )
        tokens_each, answers = await unless_stalled(
            asking, opened.supervisor, opened.command.stall_timeout_s, doing=DOING
        )
    speculation = plan.speculation
    return Tried(
        kind=speculation.kind if speculation else None,
        tokens=speculation.tokens if speculation else 0,
        tokens_each=tokens_each,
        answers=tuple(answers),
        seconds=time.monotonic() - began,
    )


async def _ask(
    asker: _Asker, plan: Plan, ask_s: float, like: Tried | None, say: Callable[[str], None]
) -> tuple[int, list[Answer]]:
    """Ask the prompts of `like` with answers as long. Without `like`: as many prompts as fit into `ask_s`, at least one
    of each kind, with answers short enough for six prompts.

    Returns the length of answers and the answers. Prompts that do not fit into the context are left out.
    """
    prompts = parse_prompts(PROMPTS.read_text(encoding="utf-8"))
    began = time.monotonic()
    warm = await asker.ask("warm", WARM, WARM_TOKENS, seed=0)
    each = ask_s * 1000 / PROMPTS_AIMED / max(0.1, warm.ms / max(1, warm.made))
    tokens_each = like.tokens_each if like else int(max(TOKENS_LEAST, min(TOKENS_MOST, each)))
    wanted = {answer.name for answer in like.answers} if like else set(prompts)
    answers: list[Answer] = []
    for seed, (name, text) in enumerate(prompts.items(), 1):
        is_late = like is None and len(answers) >= PROMPTS_LEAST and time.monotonic() - began > ask_s
        if name not in wanted or is_late or len(await asker.read(text)) + tokens_each > plan.context - 2:
            continue
        say(name)
        answers.append(await asker.ask(name, text, tokens_each, seed=seed))
    return tokens_each, answers


def parse_prompts(text: str) -> dict[str, str]:
    """Return prompts by name, in order. Each begins with a line `### kind: name`."""
    prompts: dict[str, str] = {}
    for part in text.split("### ")[1:]:
        name, _, prompt = part.partition("\n")
        prompts[name.strip()] = prompt.strip()
    return prompts


class _Asker:
    """Asks prompts as a chat does: with the model's chat template and its own sampling."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._read: dict[str, list[int]] = {}

    async def read(self, text: str) -> list[int]:
        """Return the tokens of a user message in the model's chat template."""
        if text not in self._read:
            self._read[text] = await self._client.tokenize(text, as_chat=True)
        return self._read[text]

    async def ask(self, name: str, text: str, tokens: int, *, seed: int) -> Answer:
        prompt = await self.read(text)
        return answer_of(name, await self._client.complete(prompt, tokens, seed=seed, slot=0), len(prompt))


def answer_of(name: str, found: Completion, depth: int) -> Answer:
    """Return the answer. Raises EngineNotReadyError if prompt tokens do not add up to `depth` or nothing was
    generated."""
    if found.read + found.cached != depth or found.made < 1:
        message = (
            f"engine did other work than asked: read {found.read} + cached {found.cached} of {depth}, made {found.made}"
        )
        raise EngineNotReadyError(message)
    return Answer(
        name=name,
        made=found.made - 1,
        ms=found.decode_ms,
        drafted=found.drafted,
        accepted=found.accepted,
        is_looping=is_looping(found.tokens),
    )
