"""How does a verb of the command answer? A JSON object or a person's words, an exit code, and an error with its next step."""

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

__all__ = ["ANSWERED", "ERR", "OUT", "answer", "reporting_machine_errors", "say", "tell"]


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads on, as below `| head`: say no more, and do the rest."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


OUT = _Out(highlight=False, emoji=False)
"""What was asked for. With `--json` stdout is kept for the JSON object, and this goes to stderr too."""
ERR = Console(stderr=True, highlight=False, emoji=False)


def say(line: str) -> None:
    """Print a line of what was asked for, whole and as it is written."""
    OUT.print(line, markup=False, soft_wrap=True)


def tell(line: str, style: str | None = None) -> None:
    """Print a line beside the answer, to stderr, whole and as it is written."""
    ERR.print(line, style=style, markup=False, soft_wrap=True)


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room (df -h shows the full disk)"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENODEV, errno.ENOTDIR),
        "check the disk or the mount it lies on",
    ),
}
"""What mends the errors of a file that say nothing of penstock, by their number."""


def answer(
    work: Callable[[], dict[str, Any]],
    as_json: bool,
    *,
    code: Callable[[dict[str, Any]], int] = lambda _result: 0,
    again: str = "",
    run: str = "",
) -> None:
    """Do the work, report in the form asked for, and exit with the code the contract gives.

    Args:
        again: the command that continues what a signal has stopped.
        run: the `penstock run` of the pipeline file that the work is about, which the next step of an error may name.
    """
    stdout = _stdout_for_the_answer() if as_json else sys.stdout
    try:
        with hiding_secrets(), reporting_machine_errors():
            result = work()
        exit_code = code(result)
    except PenstockError as error:
        if isinstance(error, Interrupted):
            _on_signals(signal.SIG_IGN)  # one more must not take the answer away
        result, exit_code = _failure(error.with_next_step(run)), error.exit_code
        tell(f"penstock: {error}", style="yellow" if isinstance(error, Interrupted) else "red")
        if isinstance(error, Interrupted) and again:
            result["error"]["next"] = again
            tell(f"continue with: {again}")
    except KeyboardInterrupt:
        result, exit_code = {"status": "interrupted"}, 130
        if again:
            tell(f"continue with: {again}")
    except (Exception, SystemExit) as error:
        # Not one of ours: a defect. Show it whole, and keep the contract of one JSON line.
        traceback.print_exc(file=sys.stderr)
        result, exit_code = {"status": "failed", "error": {"kind": type(error).__name__, "message": str(error)}}, 1
    if as_json:
        ANSWERED.append(exit_code)
        try:
            print(redact_text(json.dumps(result, default=str)), file=stdout, flush=True)
        except OSError as error:
            ERR.print(f"penstock: the answer cannot be written to stdout: {error.strerror}", style="red", markup=False)
            exit_code = exit_code or PreflightError.exit_code
    if result["status"] == "interrupted":
        _on_signals(signal.SIG_DFL)  # output is complete: a second Ctrl-C may kill the process
    raise typer.Exit(exit_code)


@contextlib.contextmanager
def reporting_machine_errors() -> Iterator[None]:
    """Raise PreflightError for a file that may not be written, has no room, or lies on a disk that fails."""
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
    """Keep stdout for the JSON object. What a recipe, a library or a child process prints from now on goes to stderr."""
    sys.stdout.flush()
    kept = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(2, 1)  # for what does not go through Python: compiled code, children, what Ray's workers say
    sys.stdout = sys.stderr
    return kept


def _on_signals(action: signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


ANSWERED: list[int] = []
"""Exit codes for which a JSON object was printed: none, where the command line was not understood."""


def _failure(error: PenstockError) -> dict[str, Any]:
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    described = {
        "kind": type(error).__name__,
        "message": error.message,
        "problems": list(error.problems),
        "next": error.next_step,
    }
    return {**error.result, "status": status, "error": described}
