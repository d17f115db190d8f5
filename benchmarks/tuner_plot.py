"""The one picture: regret over simulated seconds, a line a tuner, a panel a group of machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "tuner"  # else ids differ from one run to the next
FLOOR = 0.0005  # regret of nothing has no place on a scale of logarithms


class Run(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def regret(self) -> Mapping[str, float]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


def plot(groups: Mapping[str, Sequence[Run]], at: Sequence[str], folder: Path) -> None:
    """Writes tuner.png and tuner.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5.5 * len(groups), 4.5), layout="constrained")
    for axes, (title, runs) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        _panel(axes, title, runs, at)
    figure.savefig(folder / "tuner.png", dpi=120)
    figure.savefig(folder / "tuner.svg", metadata={"Date": None})


def _panel(axes: Axes, title: str, runs: Sequence[Run], at: Sequence[str]) -> None:
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        seconds = [statistics.fmean(run.seconds[n] for run in own) for n in at]
        middle = [max(FLOOR, statistics.median(run.regret[n] for run in own)) for n in at]
        tenth = [max(FLOOR, sorted(run.regret[n] for run in own)[int(0.9 * (len(own) - 1))]) for n in at]
        (line,) = axes.plot(seconds, middle, marker="o", label=name)
        axes.fill_between(seconds, middle, tenth, alpha=0.12, color=line.get_color())
        for x, y, n in zip(seconds, middle, at, strict=True):
            axes.annotate(n, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xscale="log", yscale="log", title=title, xlabel="seconds, loads included (mean)", ylabel="regret")
    axes.set_title(title, fontsize=10)
    axes.legend(title="median to 90 %, after 3, 6, 12, in the end", fontsize=8, title_fontsize=8)
