"""Number of slots for N users: candidates worth measuring, and the best measured one. Pure.

Slots beyond the number of users change no user's time; one extra slot is there for side requests. With fewer slots
requests wait. That pays if concurrent requests slow each other down more than waiting costs: N jobs of time T one after
another take T (N + 1) / 2 on average; run together they take N T each if nothing is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.plan import Plan
from appliance.tune.figures.workload import EXCESS_WEIGHT, Workload

COUNTS_MAX = 3  # each candidate costs a load and a job of every user
NOISE = 0.07  # relative noise of a time, see README


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of one user. All jobs begin at the same moment; `ttft_s` includes waiting for a slot."""

    seconds: float
    ttft_s: float
    decode_ms: float  # per token, while the others run too
    tokens_read: int
    tokens_cached: int


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """Result of one number of slots: one job of the workload for each of N users."""

    slots: int
    workload: Workload
    jobs: tuple[Job, ...]
    load_s: float = 0.0

    @property
    def users(self) -> int:
        return len(self.jobs)

    @property
    def worst_s(self) -> float:
        """Seconds until all jobs are done."""
        return max(job.seconds for job in self.jobs)

    @property
    def mean_s(self) -> float:
        return sum(job.seconds for job in self.jobs) / self.users

    @property
    def ttft_s(self) -> float:
        """Mean time to first token, s."""
        return sum(job.ttft_s for job in self.jobs) / self.users

    @property
    def worst_ttft_s(self) -> float:
        return max(job.ttft_s for job in self.jobs)

    @property
    def decode_ms(self) -> float:
        """Mean decode time per token of a user, ms."""
        return sum(job.decode_ms for job in self.jobs) / self.users

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all users together, from the earliest first token to the last token."""
        began = min(job.ttft_s for job in self.jobs)
        return self.users * self.workload.tokens_out / max(1e-9, self.worst_s - began)

    @property
    def cost_s(self) -> float:
        """Cost by which numbers of slots are compared: the mean job, plus the same penalty for late first tokens as for
        one user."""
        limit = self.workload.ttft_limit_s
        if limit is None:
            return self.mean_s
        late_s = sum(max(0.0, job.ttft_s - limit) for job in self.jobs)
        return self.mean_s + EXCESS_WEIGHT * late_s / self.users


@dataclass(frozen=True, kw_only=True)
class Chosen:
    slots: int
    why: str


def counts(plan: Plan, users: int) -> tuple[int, ...]:
    """Return the numbers of slots to measure: the planned one, then halves of the number of users.

    The number of users itself is left out: it is as fast as the planned one and has no slot for side requests. Smaller
    ones are left out if the engine's prompt cache does not keep prompts that leave their slot: users would evict each
    other, which a first job does not show.
    """
    found = [plan.parallel]
    fewer = (min(users, plan.parallel) + 1) // 2
    can_queue = users > 1 and plan.launch.may_queue
    while can_queue and fewer < found[-1] and len(found) < COUNTS_MAX:
        found.append(fewer)
        fewer = (fewer + 1) // 2
    return tuple(found)


def choose(measured: Sequence[Concurrency], *, noise: float = NOISE) -> Chosen:
    """Return the number of slots with the lowest cost; within the noise of it, the fewest slots. Raises ValueError if
    nothing was measured or results are of different jobs or users."""
    if not measured:
        message = "no slot count was measured"
        raise ValueError(message)
    if len({(one.workload, one.users) for one in measured}) > 1:
        message = "slot counts were measured with different jobs: " + ", ".join(
            f"{one.slots} slots with {one.users} of {one.workload.name}" for one in measured
        )
        raise ValueError(message)
    best = min(measured, key=lambda one: one.cost_s)
    even = [one for one in measured if one.cost_s <= best.cost_s * (1 + noise)]
    taken = min(even, key=lambda one: one.slots)
    return Chosen(slots=taken.slots, why=_why(taken, even, measured))


def _why(taken: Concurrency, even: Sequence[Concurrency], measured: Sequence[Concurrency]) -> str:
    limit_s = taken.workload.ttft_limit_s
    late = f", the slowest later than {limit_s:g} s" if limit_s is not None and taken.worst_ttft_s > limit_s else ""
    words = (
        f"{taken.users} users' {taken.workload.name} jobs take {taken.mean_s:.1f} s in the mean, {taken.worst_s:.1f} s "
        f"at worst, with a first token after {taken.ttft_s:.1f} s{late}"
    )
    others = sorted((one for one in measured if one is not taken), key=lambda one: one.slots)
    if not others:
        return f"the only count measured: {words}"
    return "; ".join((words, ", ".join(_beside(one, is_even=one in even) for one in others)))


def _beside(one: Concurrency, *, is_even: bool) -> str:
    if is_even:
        return f"{one.slots} slots are no faster than noise ({one.mean_s:.1f} s) and need no less memory"
    return f"with {one.slots} {one.mean_s:.1f} s in the mean, {one.worst_s:.1f} s at worst"


def with_slots(plan: Plan, chosen: Chosen) -> Plan:
    """Return the plan with the chosen number of slots. Its memory stays that of the planned number, which is not
    smaller."""
    choices = tuple(
        replace(choice, value=str(chosen.slots), reason=chosen.why, source="measured")
        if choice.name == "parallel"
        else choice
        for choice in plan.choices
    )
    return replace(plan, parallel=chosen.slots, choices=choices)
