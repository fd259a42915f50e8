"""Which values does user code chart besides the loss? Those of `penstock.log`, and of the dict that `loss` returns.

A value belongs to the step that runs while it is logged. It stays on its device until the ranks synchronize; then it is added
up over the calls of the step and over the ranks.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import TrainingError

if TYPE_CHECKING:
    from penstock.training.ranks import Group

__all__ = ["OwnValues", "Reduce", "collecting", "log", "logged_rows", "mlflow_warning", "record"]

Reduce = Literal["mean", "sum"]

PENSTOCKS_OWN = frozenset(f"train/{name}" for name in ("loss", "lr", "rows_per_s", "step_s", "data_wait_s", "epoch")) | {
    "val/loss"
}

_NAME = re.compile(r"[\w\-./ :]{1,250}")

_current: OwnValues | None = None


def log(name: str, value: Any, reduce: Reduce = "mean") -> None:
    """Chart a value of your own, from anywhere in user code: `penstock.log("kl", kl)`.

    In a step of training it becomes `train/kl`, in a validation `val/kl`, in the evaluation of a split `test/kl`; a name with a
    slash stays as it is. It is not a collective: ranks may log different values. Elsewhere it only warns once, so that the
    same code runs in a notebook.

    Args:
        value: a number, or a tensor with one, which is read when the ranks synchronize.
        reduce: `mean` over the rows (in `loss`) or calls of the step, of all ranks; or their `sum`.

    Raises:
        TrainingError: the value is not one number, or the name is reserved or malformed.
    """
    if _current is None:
        warnings.warn(
            "penstock.log() was called outside of training, so nothing is charted (warned once)",
            stacklevel=2,
            category=UserWarning,
        )
        return
    _current.add(name, value, reduce)


def record(name: str, value: Any) -> None:
    """Chart a value of penstock's own callbacks: `log` without a warning."""
    if _current is not None:
        _current.add(name, value, "mean")


def mlflow_warning(packages: Iterable[str]) -> str | None:
    """Return a warning if user code imports MLflow, whose calls on a training worker do not reach the run."""
    if not any(name.startswith("mlflow") for name in packages):
        return None
    return (
        "the user code imports mlflow: values and artifacts that it logs with mlflow on a training worker are not part of this "
        "run; log values with penstock.log"
    )


def logged_rows(rows: int) -> None:
    """Set the number of rows that later values count for."""
    if _current is not None:
        _current.rows = rows


@contextmanager
def collecting(values: OwnValues) -> Iterator[OwnValues]:
    """Collect the values logged in the block, in any thread of this process."""
    global _current
    before, _current = _current, values
    try:
        yield values
    finally:
        _current = before


class OwnValues:
    """Values that one rank has logged since the ranks synchronized.

    Args:
        group: the ranks to add up; None is this process alone.
        phase: in front of names without a slash: `train`, `val`, or a split.
    """

    def __init__(self, group: Group | None, phase: str) -> None:
        self.rows = 1
        """Rows that a logged value counts for."""
        self._group = group
        self._phase = phase
        self._lock = threading.Lock()
        self._steps: list[dict[str, list[Any]]] = [{}]
        """For each step: name -> [sum of value times rows, rows]."""
        self._reduce: dict[str, Reduce] = {}
        self._agreed: dict[str, Reduce] = {}

    def add(self, name: str, value: Any, reduce: Reduce) -> None:
        """Add a value; see `log`.

        Raises:
            TrainingError: as of `log`, or `name` was logged with another `reduce` before.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("/"):
            raise TrainingError(
                f"penstock.log({name!r}): a chart's name is letters, digits, spaces and any of _ - . / :",
                next_step="rename the value",
            )
        chart = name if "/" in name else f"{self._phase}/{name}"
        if chart in PENSTOCKS_OWN:
            raise TrainingError(f"penstock.log({name!r}): {chart} is penstock's own chart", next_step="rename the value")
        if reduce not in ("mean", "sum") or self._reduce.get(chart, reduce) != reduce:
            known = self._reduce.get(chart)
            raise TrainingError(
                f"penstock.log({name!r}, reduce={reduce!r}): "
                + (f"it was {known!r} before" if known else "it is 'mean' or 'sum'"),
                next_step="log one name in one way",
            )
        number = value.detach() if hasattr(value, "detach") else value
        if getattr(number, "numel", lambda: 1)() != 1:
            raise TrainingError(
                f"penstock.log({name!r}): a tensor of shape {list(number.shape)}; one number is charted",
                next_step="log its mean, or each entry under its own name",
            )
        try:
            number = number.reshape(()).double() if hasattr(number, "detach") else float(number)
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"penstock.log({name!r}): {value!r} is a {type(value).__name__}, not a number", next_step="log a number"
            ) from error
        rows = self.rows if reduce == "mean" else 1
        with self._lock:
            self._reduce[chart] = reduce
            total = self._steps[-1].setdefault(chart, [0.0, 0.0])
            total[0] = total[0] + number * rows
            total[1] += rows

    def end_step(self) -> None:
        """Start the next step."""
        with self._lock:
            self._steps.append({})

    @property
    def names(self) -> list[str]:
        """Names of the values logged on this rank."""
        return sorted(self._reduce)

    @property
    def new_names(self) -> int:
        """Number of names that are not shared yet."""
        return len(self._reduce.keys() - self._agreed.keys())

    def agree(self) -> None:
        """Share the names of all ranks. A collective."""
        if self._group is None or self._group.world_size == 1:
            self._agreed = dict(self._reduce)
            return
        for known in self._group.everyones({"names": json.dumps(self._reduce)}):
            self._agreed.update(json.loads(known["names"]))
        self._agreed = dict(sorted(self._agreed.items()))

    def add_up(self, steps: int) -> list[dict[str, float]]:
        """Add up the last `steps` steps over all ranks, and drop them. A collective if names are shared."""
        with self._lock:
            done, self._steps = self._steps[:steps], self._steps[steps:] or [{}]
        if not self._agreed:
            return [{} for _ in range(steps)]
        done += [{}] * (steps - len(done))
        cells = [step.get(name, (0.0, 0.0)) for step in done for name in self._agreed]
        flat = [number for total, rows in cells for number in (float(total), rows)]
        summed = iter(self._group.sum(flat) if self._group is not None else flat)
        found: list[dict[str, float]] = []
        for _ in range(steps):
            values = {}
            for name, reduce in self._agreed.items():
                total, rows = next(summed), next(summed)
                if rows:
                    values[name] = total / rows if reduce == "mean" else total
            found.append(values)
        return found

    def totals(self) -> dict[str, float]:
        """Add up all values as one step. A collective."""
        new = self._group.sum([float(self.new_names)])[0] if self._group is not None else self.new_names
        if new:
            self.agree()
        return self.add_up(1)[0]
