"""How do the numbers of the charts reach files: JSON lines, and what TensorBoard reads? Each step once, also after a kill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PreflightError
from penstock.training.callbacks.callback import Training

__all__ = ["JsonLines", "TensorBoard"]


class JsonLines:
    """Writes `metrics.jsonl`: a line `{"step": 3, "train/loss": 0.7, ...}` for each step and each validation.

    Args:
        folder: where; without it `callbacks` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._file: Any = None

    def start(self, training: Training) -> None:
        """Keep the lines up to the step where training goes on."""
        if training.rank != 0:
            return
        path = _folder(self._folder, training) / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= training.steps]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def logged(self, training: Training, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def end(self, training: Training) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Writes event files for `tensorboard --logdir`. Needs `pip install penstock[tensorboard]`.

    Args:
        folder: where; without it `callbacks/tensorboard` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        try:
            import tensorboard  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise PreflightError(
                "train.callbacks: tensorboard is not installed", next_step="pip install 'penstock[tensorboard]'"
            ) from error
        self._folder = folder
        self._writer: Any = None

    def start(self, training: Training) -> None:
        """Open a file whose steps replace those that an earlier one has beyond the step where training goes on."""
        if training.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            folder = _folder(self._folder, training) / "tensorboard"
            self._writer = SummaryWriter(str(folder), purge_step=training.steps + 1)

    def logged(self, training: Training, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each chart."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def checkpoint(self, training: Training) -> None:
        """What a resume relies on is on disk."""
        if self._writer is not None:
            self._writer.flush()

    def end(self, training: Training) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _folder(given: str | None, training: Training) -> Path:
    folder = training.folder if given is None else Path(given)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lines(path: Path) -> list[str]:
    """Whole lines; a kill may have cut the last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.split("\n")[:-1]
