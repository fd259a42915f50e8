"""Is the library there that a format is read by, and if not, how does one get it?"""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import PreflightError

__all__ = ["library"]


def library(module: str, format: str, extra: str) -> Any:
    """Import a library that only one format needs.

    Args:
        extra: of penstock, which installs it.

    Raises:
        PreflightError: it cannot be imported here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PreflightError(
            f"data.format: {format} is read by the package {module.partition('.')[0]}, which cannot be imported here ({error})",
            next_step=f'pip install "penstock[{extra}]", on every node of a cluster too',
        ) from error
