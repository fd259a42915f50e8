"""How does a comparison of two runs look as a page?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.flows.history.render import render

__all__ = ["comparison_page"]


def comparison_page(compared: Mapping[str, Any]) -> str:
    """HTML of what `penstock compare --json` prints."""
    values = {name: value for name, value in compared.items() if name not in ("status", "main_metric", "by_file")}
    return render("comparison.html", title=f"{compared['after']['run']} held against {compared['before']['run']}", **values)
