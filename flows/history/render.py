"""Render the page with jinja2, all values escaped, and curves as inline SVG."""

from __future__ import annotations

import datetime as dt
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

_WIDTH, _HEIGHT, _MARGIN = 520, 220, 24


def render(**values: Any) -> str:
    """Fill in the template of this folder; all values are escaped."""
    template = files("penstock.flows.history").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=_number, seconds=lambda s: f"{s:.1f} s" if s < 100 else dt.timedelta(seconds=round(s)))
    environment.globals.update(line_chart=line_chart)
    return environment.from_string(template).render(**values)


def line_chart(curves: Mapping[str, Curve]) -> Markup:
    """Draw curves on common axes, as SVG with colours from the page's style (`c0`, `c1`, ...)."""
    drawn = {name: [p for p in curve[:: len(curve) // MAX_POINTS + 1] if math.isfinite(p[1])] for name, curve in curves.items()}
    if not any(drawn.values()):
        return Markup("")
    (low_x, high_x), (low_y, high_y) = (
        (min(values), max(values)) for values in zip(*(point for curve in drawn.values() for point in curve), strict=True)
    )
    across, up = (_WIDTH - 2 * _MARGIN) / ((high_x - low_x) or 1), (_HEIGHT - 2 * _MARGIN) / ((high_y - low_y) or 1)
    ends = {(_MARGIN, 14): f"{_number(low_y)} to {_number(high_y)}", (_MARGIN, _HEIGHT - 4): f"{low_x:,.0f}"}
    ends[_WIDTH - 2 * _MARGIN, _HEIGHT - 4] = f"{high_x:,.0f}"
    parts = [f'<text class="tick" x="{x}" y="{y}">{text}</text>' for (x, y), text in ends.items()]
    for number, (name, curve) in enumerate(drawn.items()):
        places = [f"{_MARGIN + (x - low_x) * across:.1f},{_HEIGHT - _MARGIN - (y - low_y) * up:.1f}" for x, y in curve]
        path = " ".join(places * 2 if len(places) == 1 else places)  # a line to itself is a dot
        parts.append(f'<g><title>{escape(name)}</title><polyline class="c{number % 4}" points="{path}"/></g>')
    label = escape(f"{', '.join(curves)} by step")
    return Markup(f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def _number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) and 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
