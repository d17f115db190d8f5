"""The picture: modelled speed over slots, a line a rule, a panel a trace and machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "hybrid"  # else ids differ from one run to the next


class Row(Protocol):
    @property
    def trace(self) -> str: ...
    @property
    def machine(self) -> str: ...
    @property
    def slots(self) -> int: ...
    @property
    def tokens_per_s(self) -> Mapping[str, float]: ...


def plot(rows: Sequence[Row], folder: Path, ours: str, bound: str) -> None:
    """Writes hybrid.png and hybrid.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    traces = list(dict.fromkeys(row.trace for row in rows))
    machines = list(dict.fromkeys(row.machine for row in rows))
    figure = Figure(figsize=(4.2 * len(machines), 3.6 * len(traces) + 0.8), layout="constrained")
    panels = figure.subplots(len(traces), len(machines), squeeze=False)
    for axes_row, trace in zip(panels, traces, strict=True):
        for axes, machine in zip(axes_row, machines, strict=True):
            own = sorted((r for r in rows if (r.trace, r.machine) == (trace, machine)), key=lambda row: row.slots)
            _panel(axes, f"{trace}, {machine}", own, ours, bound)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(folder / "hybrid.png", dpi=110)
    figure.savefig(folder / "hybrid.svg", metadata={"Date": None})


def _panel(axes: Axes, title: str, rows: Sequence[Row], ours: str, bound: str) -> None:
    for name in rows[0].tokens_per_s if rows else ():
        if "bound" in name and name != bound:
            continue  # too near the other to be told apart
        style = {ours: {"linewidth": 2.5, "color": "black"}, bound: {"linestyle": "--", "color": "gray"}}.get(name, {})
        axes.plot(
            [row.slots for row in rows], [row.tokens_per_s[name] for row in rows], marker=".", label=name, **style
        )
    axes.set_xscale("log", base=2)
    slots = [row.slots for row in rows]
    axes.set_xticks(slots, [str(count) for count in slots])
    axes.set(title=title, xlabel="slots in each layer", ylabel="tok/s, modelled")
    axes.set_title(title, fontsize=10)
