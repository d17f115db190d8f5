"""What an engine adds to the plan that every engine has, and what each of its knobs does to a plan's speed."""

from __future__ import annotations

from typing import Literal

from appliance.values import dataclass

Value = int | str
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Base of each engine's own frozen dataclass: what its command line has beside the plan's shared fields. Kept in
    profiles as JSON: numbers, texts, booleans and None."""

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """Of these fields, what the tuner varies: names of settings with their values."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Beside text: image, audio."""
        return ()

    @property
    def calls_tools(self) -> bool:
        """Whether the engine takes tools, and gives calls as such, where the model writes any."""
        return True

    @property
    def splits_reasoning(self) -> bool:
        """Whether the engine gives reasoning apart from the answer, where the model reasons."""
        return True

    @property
    def tie_break(self) -> int:
        """Of two plans as fast as each other, the one with more is taken."""
        return 0

    @property
    def may_queue(self) -> bool:
        """Whether a user may wait for a slot without losing what is cached of the conversation."""
        return True


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """What a step of a knob's value does beyond what `Costs` predict. Words are one step apart, numbers one for each
    value that lies between.

    `prior` is the standard deviation of ln(true / predicted) for one step, or for a doubling. `parts` are the fields of
    `Costs` that it scales, by their beginning ("cpu": cpu_ms, cpu_depth_us and cpu_prefill_ms); empty: all.
    """

    prior: float = 0.1
    phases: tuple[Phase, ...] = ("decode", "prefill")
    parts: tuple[str, ...] = ()
    is_of_doubling: bool = False


PREDICTED = KnobEffect(phases=())  # for a knob whose whole effect is in the costs
