"""Render the page with jinja2, all values escaped, and curves as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

__all__ = ["Curve", "line_chart", "render"]

Curve = Sequence[tuple[float, float]]
"""(x, y) of each point, in order of x."""

MAX_POINTS = 600
"""A longer curve is thinned evenly to this many points, so that the page stays small."""

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 220, 56, 26, 12


def render(**values: Any) -> str:
    """Fill in the template of this folder; all values are escaped."""
    template = files("penstock.flows.history").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=_number, seconds=_seconds)
    environment.globals.update(line_chart=line_chart)
    return environment.from_string(template).render(**values)


def line_chart(curves: Mapping[str, Curve]) -> Markup:
    """Draw curves on common axes, as SVG with colours from the page's style (`c0`, `c1`, ...)."""
    drawn = {name: [p for p in _thinned(curve) if math.isfinite(p[1])] for name, curve in curves.items()}
    points = [point for curve in drawn.values() for point in curve]
    if not points:
        return Markup("")
    low_x, high_x = _range([x for x, _ in points])
    low_y, high_y = _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - 10)
        return across, _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for share in (0.0, 0.5, 1.0):
        value = low_y + share * (high_y - low_y)
        _, at = place(low_x, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
        along, _ = place(low_x + share * (high_x - low_x), low_y)
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        tick = f"{low_x + share * (high_x - low_x):,.4g}"
        parts.append(f'<text class="tick" x="{along:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{tick}</text>')
    for number, (name, curve) in enumerate(drawn.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        shape = f'<polyline class="c{number % 4}" points="{path}"/>'
        if len(curve) < 2:
            shape = "".join(
                f'<circle class="c{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(lambda p: place(*p), curve)
            )
        parts.append(f"<g><title>{escape(name)}</title>{shape}</g>")
    label = escape(f"{', '.join(curves)} by step")
    return Markup(f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    every = max(1, math.ceil(len(curve) / MAX_POINTS))
    kept = list(curve[::every])
    return kept if not curve or kept[-1] == curve[-1] else [*kept, curve[-1]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = abs(low) / 10 or 0.5
    return (low, high) if high > low else (low - margin, high + margin)


def _tick(value: float) -> str:
    """Format a value short enough for the axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) and 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
