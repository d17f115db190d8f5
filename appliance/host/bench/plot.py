"""Draws the rows: prefill, decode and TTFT over the prompt length, one line for each concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from appliance.errors import ConfigError, UsageError
from appliance.host.bench.figures import Row, Spread

KINDS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Check before the measurement that the picture can be written. Raises UsageError or ConfigError."""
    if path.suffix not in KINDS:
        message = f"unknown picture format: {path.suffix or path.name}"
        raise UsageError(message, hint=f"the name of --plot FILE must end with one of {', '.join(KINDS)}")
    if not path.absolute().parent.is_dir():
        message = f"no such folder: {path.absolute().parent} (from --plot {path})"
        raise ConfigError(message, hint="create the folder first")
    if find_spec("matplotlib") is None:
        message = "a picture needs matplotlib, which is not installed"
        raise ConfigError(message, hint="pip install matplotlib; or use --json and plot it elsewhere")


def plot(title: str, rows: Sequence[Row], path: Path) -> None:
    # imported here: it costs half a second, and most runs draw nothing
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = (("prefill", "tok/s"), ("decode of one request", "tok/s"), ("TTFT", "ms"))
    for axes, (name, unit) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for concurrency in sorted({row.concurrency for row in rows}):
            points = [(row.prompt, _value(row, name)) for row in rows if row.concurrency == concurrency]
            drawn = [(x, y) for x, y in points if y is not None]
            if drawn:
                axes.plot(*zip(*drawn, strict=True), marker="o", label=f"{concurrency} at once")
        axes.set(xscale="log", xlabel="prompt tokens", ylabel=unit)
        axes.set_title(f"{name}, median")
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        sizes = sorted({row.prompt for row in rows})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        message = f"the picture cannot be written: {path}: {error}"
        raise ConfigError(message, hint="--plot takes a file in a folder that you may write to") from error


def _value(row: Row, name: str) -> float | None:
    spreads: dict[str, Spread | None] = {
        "prefill": row.prefill_tokens_per_s,
        "decode of one request": row.decode_tokens_per_s,
        "TTFT": row.ttft_ms,
    }
    spread = spreads[name]
    return spread.p50 if spread else None
