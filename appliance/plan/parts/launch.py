"""Settings of a plan that only one engine has, and the effect of each knob on a plan's speed."""

from __future__ import annotations

from typing import Literal

from appliance.values import dataclass

Value = int | str
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Base class for an engine's own part of a plan, which its command line needs besides the shared fields.

    Profiles keep it as JSON, so fields are numbers, texts, booleans or None.
    """

    @property
    def knobs(self) -> tuple[tuple[str, Value], ...]:
        """Fields that the tuner varies: names of settings with their values."""
        return ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs other than text: image, audio."""
        return ()

    @property
    def calls_tools(self) -> bool:
        """True if the engine accepts tools and returns a model's tool calls as such."""
        return True

    @property
    def splits_reasoning(self) -> bool:
        """True if the engine returns a model's reasoning apart from its answer."""
        return True

    @property
    def tie_break(self) -> int:
        """Preference between equally fast plans: the larger number wins."""
        return 0

    @property
    def may_queue(self) -> bool:
        """True if users may wait for a slot without losing the cached tokens of their conversations."""
        return True


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """Effect of a step of a knob's value on speed, in addition to what `Costs` predict.

    Between texts there is one step, between numbers one step for each candidate value.
    """

    prior: float = 0.1  # standard deviation of ln(true / predicted) for one step
    phases: tuple[Phase, ...] = ("decode", "prefill")
    parts: tuple[str, ...] = ()  # prefixes of the `Costs` fields it scales ("cpu": cpu_ms, cpu_depth_us, ...); (): all
    is_of_doubling: bool = False  # True if a step is a doubling of the value
    absent: Value | None = None  # the value of plans without the knob; None: the costs contain the difference


PREDICTED = KnobEffect(phases=())  # for a knob whose whole effect is in the costs
