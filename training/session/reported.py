"""What becomes of the values of a report? Numbers are charted; images, texts and histograms of arrays are small files."""

from __future__ import annotations

import io
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch

from penstock.errors import TrainingError

__all__ = ["OWN_PREFIXES", "Sorted", "as_json", "over_ranks", "sort_values"]

MOST_BYTES = 1 << 20
"""Of a reported text or encoded image."""

MOST_RETURNED_BYTES = 1 << 16
"""Of what a function returns, as JSON."""

OWN_PREFIXES = ("report/", "workers/")
"""Names that penstock gives values of its own."""

_BINS = 64

_MOST_LETTERS = 1000
"""Of a text in the report that the driver's function gets."""

_HOW: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "sum": math.fsum, "min": min, "max": max}


class Sorted(NamedTuple):
    """The values of one rank's report."""

    numbers: dict[str, float]
    texts: dict[str, str]
    files: dict[str, bytes]
    """`<name>.png` or `<name>.txt`."""
    left: dict[str, str]
    """Name of each value that is not kept -> its type."""


def sort_values(metrics: Mapping[str, Any], *, draw: bool) -> Sorted:
    """Sort the values of a report by what becomes of them.

    Args:
        draw: encode images and histograms, too.

    Raises:
        TrainingError: a name is penstock's own, or a text or image is too large.
    """
    found = Sorted({}, {}, {}, {})
    for name, value in metrics.items():
        if str(name).startswith(OWN_PREFIXES):
            raise TrainingError(
                f"ray.train.report: {name!r} begins with {' or '.join(OWN_PREFIXES)}, which are penstock's own values",
                next_step="rename the value",
            )
        if isinstance(value, str):  # first, for NumPy's strings have a dtype
            content = value.encode(errors="replace")
            text = content.decode()
            found.texts[name] = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
            found.files[f"{name}.txt"] = content
        elif _is_number(value):
            found.numbers[name] = float(value.item() if hasattr(value, "item") else value)
        elif (drawn := _drawn(name, value, draw)) is not None:
            found.files[f"{name}.png"] = drawn
        else:
            found.left[name] = type(value).__name__
    for file, content in found.files.items():
        if len(content) > MOST_BYTES:
            raise TrainingError(
                f"ray.train.report: {file.rpartition('.')[0]!r} takes {len(content):,} bytes; at most {MOST_BYTES:,} are kept",
                next_step="report a smaller image or a shorter text, or write it into the checkpoint's folder",
            )
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, numbers.Real):
        return True
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    # JAX's bfloat16 has the kind V, as NumPy's records have.
    return getattr(value, "size", 0) == 1 and (kind in set("fiub") or (kind == "V" and value.dtype.name.startswith("bfloat")))


def _drawn(name: str, value: Any, draw: bool) -> bytes | None:
    """Encode an image, or the histogram of an array, as PNG; None for a value of another kind."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, np.ndarray):
        if not value.size or value.dtype.kind not in "fiub":
            return None
        if value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))):
            value = PIL.Image.fromarray(value) if draw else value
        elif draw:
            return _histogram(name, value)
    elif not isinstance(value, PIL.Image.Image):
        return None
    into = io.BytesIO()
    if draw:
        value.save(into, "png")
    return into.getvalue()


def _histogram(name: str, values: np.ndarray) -> bytes:
    from matplotlib.figure import Figure  # its import takes half a second

    flat = values.ravel().astype(np.float64)
    finite, into = flat[np.isfinite(flat)], io.BytesIO()
    figure = Figure((4, 3), layout="constrained")
    axes = figure.subplots()
    axes.hist(finite, bins=_BINS)
    axes.set_title(f"{name}: {len(flat):,} values" + (f", {len(flat) - len(finite):,} not finite" * (len(finite) < len(flat))))
    figure.savefig(into, format="png", dpi=100)
    return into.getvalue()


def file_name(name: str, step: int) -> str:
    """Return the path of a file of a report in the tracked run: one of a name for each step."""
    stem, _, suffix = name.rpartition(".")
    parts = [part for part in re.sub(r"[^\w\-. /]", "_", stem).split("/") if part.strip(".")]
    return "/".join(["reports", *parts, f"{step:010d}.{suffix}"])


def over_ranks(rule: str, ranks: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Aggregate a value over the ranks that report it; None if none does. Of NaN and others it is NaN."""
    values = [each[name] for each in ranks if name in each]
    if not values or any(math.isnan(value) for value in values):
        return math.nan if values else None
    return float(_HOW[rule](values))


def as_json(value: Any) -> tuple[str, str]:
    """Encode what a function returns; the second is why only its `repr` is kept, or empty."""
    try:
        text = json.dumps(value, default=_plain)
        why = "" if len(text) <= MOST_RETURNED_BYTES else f"takes {len(text):,} bytes of JSON"
    except (TypeError, ValueError, RecursionError):
        text, why = "", f"is a {type(value).__name__}, which is not JSON"
    return (json.dumps(repr(value)[:_MOST_LETTERS]), why) if why else (text, "")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of NumPy and torch
        return value.tolist()
    raise TypeError(type(value).__name__)
