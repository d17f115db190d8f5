"""Silent losses: speed that this machine could have and does not, without any error. Pure.

Each has a kind, what was seen, and what to do. A figure that is unknown is no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from appliance.plan import Plan
from appliance.probe import Gpu
from appliance.probe.load.conditions import REASONS, SLOWDOWN_BITS, WORKING
from appliance.probe.load.load import GpuMoment
from appliance.profile.record import Profile
from appliance.tune.figures.curve import Curve
from appliance.tune.figures.measurement import curve_of
from appliance.tune.figures.speeds import predicted_speeds
from appliance.values import dataclass

# Share of the lower end of a prediction's interval. One published result of ten is below that end by chance.
FAR_BELOW = 0.8
# Share of the speed that an earlier image had. Two measurements of one image differ by up to a tenth.
WORSE = 0.8
# Share of a minute's readings of a working GPU: short events of the power supply are usual.
THROTTLED = 0.5
THROTTLED_LEAST = 3  # readings


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss. `kind` is a word for metrics and scripts."""

    kind: str
    what: str
    hint: str


def of_machine(gpus: Iterable[Gpu]) -> Iterator[Loss]:
    """Yield what slots and limits of these GPUs cost."""
    for gpu in gpus:
        width, most = gpu.pcie_width, gpu.pcie_width_max
        if width is not None and most is not None and 0 < width < most:
            yield Loss(
                kind="pcie_narrow",
                what=f"GPU {gpu.index} has {width} PCIe lanes of {most}",
                hint="use another slot, or take out what shares its lanes",
            )
        now, usual = gpu.power_limit_w, gpu.power_limit_default_w
        if now is not None and usual is not None and now < usual:
            yield Loss(
                kind="power_limit",
                what=f"GPU {gpu.index} is limited to {now:g} W, by default {usual:g} W",
                hint=f"`nvidia-smi -i {gpu.index} -pl {usual:g}` on the host removes the limit",
            )


def of_speed(plan: Plan, profile: Profile | None) -> Iterator[Loss]:
    """Yield a loss if the plan was measured far below the interval of its prediction, on a quiet machine."""
    curve = _curve(plan, profile)
    predicted = predicted_speeds(plan)
    interval = plan.speed.decode_interval if plan.speed else None
    if curve is None or predicted is None or interval is None:
        return
    depth = min(predicted.at[0].depth, curve.deepest)
    measured = 1000 / curve.decode_ms(depth)
    if measured < FAR_BELOW * interval.low:
        yield Loss(
            kind="below_prediction",
            what=f"decodes {measured:.1f} tok/s at {depth:,} tokens; predicted were {interval.describe()}",
            hint="`appliance doctor` looks for what slows this machine; `appliance tune` measures again",
        )


def of_builds(plan: Plan, profile: Profile | None, earlier: Iterable[Profile]) -> Iterator[Loss]:
    """Yield a loss if the newest profile of another image for the same model, machine and settings is much faster.

    `earlier` are such profiles, newest first.
    """
    now = _curve(plan, profile)
    before = next((each for each in earlier if each.disturbance is None), None)
    if now is None or before is None or profile is None or before.mode != profile.mode:
        return
    then = _curve(before.plan, before)
    if then is None:
        return
    depth = min(now.deepest, then.deepest)
    speed, faster = 1000 / now.decode_ms(depth), 1000 / then.decode_ms(depth)
    if speed < WORSE * faster:
        build = str(before.key.parts.get("build"))
        yield Loss(
            kind="slower_build",
            what=f"decodes {speed:.1f} tok/s at {depth:,} tokens; the image of build {build} decoded {faster:.1f}",
            hint=f"go back to the image of build {build}, or report it with `appliance doctor --bundle`",
        )


def of_clocks(looks: Sequence[Sequence[GpuMoment]]) -> Iterator[Loss]:
    """Yield the GPUs that heat or the power supply slowed down in most of these readings while they worked."""
    for index in sorted({gpu.index for look in looks for gpu in look}):
        working = [
            gpu
            for look in looks
            for gpu in look
            if gpu.index == index and gpu.reasons is not None and (gpu.utilization or 0) >= WORKING
        ]
        slowed = [gpu for gpu in working if (gpu.reasons or 0) & SLOWDOWN_BITS]
        if len(working) < THROTTLED_LEAST or len(slowed) < THROTTLED * len(working):
            continue
        bits = {bit for gpu in slowed for bit in REASONS if bit & (gpu.reasons or 0) & SLOWDOWN_BITS}
        shares = [share for gpu in slowed if (share := gpu.clock_share) is not None]
        clock = f", at {sum(shares) / len(shares):.0%} of its clock" if shares else ""
        yield Loss(
            kind="gpu_throttled",
            what=f"GPU {index} is slowed down ({', '.join(REASONS[bit] for bit in sorted(bits))}){clock}",
            hint="look at its fans, the air around it, and its power cables",
        )


def of_missing(before: Iterable[Gpu], now: Iterable[Gpu], problem: str | None = None) -> Iterator[Loss]:
    """Yield the GPUs that were there before and are not now. `problem` says why the driver shows none."""
    there = {gpu.uuid for gpu in now if not gpu.problem}
    for gpu in before:
        if gpu.uuid is not None and not gpu.problem and gpu.uuid not in there:
            why = f": {problem}" if problem else ""
            yield Loss(
                kind="gpu_gone",
                what=f"GPU {gpu.index} ({gpu.name or 'unnamed'}) is gone since the start{why}",
                hint="look for Xid in `dmesg` on the host; start the container again once it is back",
            )


def _curve(plan: Plan, profile: Profile | None) -> Curve | None:
    """Return the plan's curve from an undisturbed profile."""
    if profile is None or profile.disturbance is not None:
        return None
    looks = [look for look in profile.measurements if look.key in plan.keys and look.points]
    return curve_of(looks) if looks else None
