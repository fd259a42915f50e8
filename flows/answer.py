"""Answer for a verb: a JSON object or lines, an exit code, and an error with its next step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import typer
from rich.console import Console

from penstock.errors import Interrupted, PenstockError, PreflightError
from penstock.redact import hiding_secrets, redact_text

__all__ = ["ANSWERED", "ERR", "OUT", "LineConsole", "answer", "print_line", "print_note", "reporting_machine_errors"]


class LineConsole(Console):
    """Prints each line whole and as it is written; a table needs `soft_wrap=False`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=False, soft_wrap=True, **options)

    def on_broken_pipe(self) -> None:
        """Print nothing more if the reader is gone, as below `| head`, and finish the work."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


OUT = LineConsole()
"""The answer. With `--json` stdout is kept for the JSON object, and this goes to stderr too."""
ERR = LineConsole(stderr=True)


def print_line(line: str) -> None:
    """Print a line of the answer to stdout."""
    OUT.print(line)


def print_note(line: str, style: str | None = None) -> None:
    """Print a line beside the answer, to stderr."""
    ERR.print(line, style=style)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room (df -h shows the full disk)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV, errno.ENOTDIR),
        "check the disk or the mount it lies on",
    ),
}
"""errno of a file -> advice."""


def answer(work: Callable[[], dict[str, Any]], as_json: bool, *, again: str = "", run: str = "") -> None:
    """Do the work, print its result, and exit with 0 or the code of its error.

    Args:
        again: the command that continues work stopped by a signal.
        run: the `penstock run` command of the pipeline, for the next step of an error.
    """
    stdout = _stdout_for_the_answer() if as_json else sys.stdout
    try:
        with hiding_secrets(), reporting_machine_errors():
            result, exit_code = work(), 0
    except PenstockError as error:
        if isinstance(error, Interrupted):
            _on_signals(signal.SIG_IGN)  # a second signal must not prevent the answer
        result, exit_code = _failure(error.with_next_step(run)), error.exit_code
        print_note(f"penstock: {error}", style="yellow" if isinstance(error, Interrupted) else "red")
        if isinstance(error, Interrupted) and again:
            result["error"]["next"] = again
            print_note(f"continue with: {again}")
    except KeyboardInterrupt:
        result, exit_code = {"status": "interrupted"}, 130
        if again:
            print_note(f"continue with: {again}")
    except (Exception, SystemExit) as error:
        # A defect: show it whole, and still print one JSON object.
        traceback.print_exc(file=sys.stderr)
        result, exit_code = {"status": "failed", "error": {"kind": type(error).__name__, "message": str(error)}}, 1
    if as_json:
        ANSWERED.append(exit_code)
        try:
            print(redact_text(json.dumps(result, default=str)), file=stdout, flush=True)
        except OSError as error:
            ERR.print(f"penstock: the answer cannot be written to stdout: {error.strerror}", style="red")
            exit_code = exit_code or PreflightError.exit_code
    if result["status"] == "interrupted":
        _on_signals(signal.SIG_DFL)  # output is complete: a second Ctrl-C may kill the process
    raise typer.Exit(exit_code)


@contextlib.contextmanager
def reporting_machine_errors() -> Iterator[None]:
    """Raise PreflightError if a file cannot be written: permissions, a full disk, a failing disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ADVICE:
            raise
        raise PreflightError(
            f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror),
            next_step=f"{_ADVICE[error.errno]}, and run the same command again",
        ) from error


def _stdout_for_the_answer() -> TextIO:
    """Keep stdout for the JSON object; from now on recipes, libraries and child processes print to stderr."""
    sys.stdout.flush()
    kept = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(2, 1)  # for output that bypasses Python: compiled code, child processes, lines of Ray's workers
    sys.stdout = sys.stderr
    return kept


def _on_signals(action: signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


ANSWERED: list[int] = []
"""Exit codes of printed JSON objects: empty if the command line was wrong."""


def _failure(error: PenstockError) -> dict[str, Any]:
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    described = {
        "kind": type(error).__name__,
        "message": error.message,
        "problems": list(error.problems),
        "next": error.next_step,
    }
    return {**error.result, "status": status, "error": described}
