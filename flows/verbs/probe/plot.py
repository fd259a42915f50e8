"""How does a reading look? Waits for batches over time, where the time went, and what was tried, as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.flows.verbs.probe.measure import Reading

__all__ = ["draw"]


def draw(file: Path, title: str, configured: Reading, tried: Sequence[tuple[str, float]]) -> None:
    """Write the figure.

    Args:
        tried: label of each set of values, and its rows a second.
    """
    figure = Figure(figsize=(9, 8), layout="constrained")
    waits, time, rates = figure.subplots(3, 1, height_ratios=(3, 2, max(1, len(tried)) * 0.6 + 0.6))
    figure.suptitle(title)
    _waits(waits, configured)
    names, shares = [*configured.time][::-1], [share * 100 for share in configured.time.values()][::-1]
    time.barh(names, shares)
    time.set_xlabel("% of the workers' time")
    labels, speeds = zip(*[("as configured", configured.rows_per_s), *tried], strict=True)
    rates.barh(labels[::-1], speeds[::-1])
    rates.set_xlabel("rows/s, all workers")
    figure.savefig(file, dpi=110)


def _waits(axes: Axes, reading: Reading) -> None:
    for rank in reading.ranks:
        # A wait of 0 has no place on a logarithmic axis.
        axes.plot([max(wait_s * 1e3, 1e-3) for wait_s in rank.waits_s], ".", markersize=3, label=f"worker {rank.rank}")
    axes.set_yscale("log")
    axes.set_xlabel("batch")
    axes.set_ylabel("wait, ms")
    axes.axhline(max(reading.p95_s * 1e3, 1e-3), linewidth=0.8, color="grey", label="P95")
    axes.legend(loc="upper right")
