"""Run the flow in this process: start servers, call it, and turn its end into a result or an error."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import Interrupted, PenstockError, SpecError
from penstock.flows.preflight.checks import Preflight
from penstock.flows.servers.services import check_mlflow_answers, prefect_api, prepare_environment
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.machine.stopping import StopRequest, stopping_on_signals
from penstock.messages import did_you_mean
from penstock.plugins import needed
from penstock.progress import in_notebook
from penstock.storage import filesystem_of
from penstock.stores import is_local
from penstock.tasks.stages import STAGES

if TYPE_CHECKING:
    import ray.train
    from prefect import State

__all__ = ["RunResult", "perform_flow", "raise_interrupted_on_stop", "run", "run_loaded"]

_STOP_LOOKS_S = 0.3
"""A stop that completes sooner is not announced."""


def run(
    spec: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    train_func: Callable[..., Any] | None = None,
    data: Mapping[str, Any] | None = None,
    fresh: bool = False,
    until: str | None = None,
    on_report: Callable[[dict[str, Any]], object] | None = None,
) -> RunResult:
    """Run or continue a pipeline in this process and return what `penstock run --json` prints.

    Args:
        spec: the pipeline file, or its folder; or a dict of what it would hold, with functions and classes in place of
            `file.py:name`, and paths relative to the working directory (docs/python.md).
        overrides: changes of single values, such as `train.epochs=3`.
        train_func: the function to train by, as `train.loop`: of a script, a notebook's cell or a closure, too.
        data: rows in place of the file's: `{"train": frame}`, and optionally validation, test, and further datasets that
            `train.loop` asks for. What a frame may be is in docs/python.md; the rows are kept in the storage, so that the
            run can continue.
        fresh: start a new run instead of continuing the last one.
        until: stop after this stage.
        on_report: called here with every report of every worker of `train.loop`: a dict of its values, `rank`, `step`, and
            those of docs/ray-train.md that begin with `report/`.

    Raises:
        PenstockError: the error that stopped the run; its attribute `result` holds the results so far.
    """
    if until is not None and until not in STAGES:
        raise SpecError(
            f"until={until!r} is not a stage{did_you_mean(until, STAGES)}", next_step=f"use one of {', '.join(STAGES)}"
        )
    if train_func is None and data is None:
        loaded = load_spec(spec, overrides)
    else:
        load_given = needed("penstock.flows.given.load:load_given", "a function or rows of a program")
        loaded = load_given(spec, overrides, train_func, data)
    if on_report is not None and loaded.spec.train.loop is None:
        raise SpecError(
            "on_report=... gets the reports of a function, and the pipeline has no train.loop",
            next_step="leave it out; a callback of train.callbacks is called while a recipe trains",
        )
    # A notebook shows stderr as an alarm.
    with contextlib.redirect_stderr(sys.stdout) if in_notebook() else contextlib.nullcontext():
        try:
            return RunResult(run_loaded(loaded, fresh=fresh, until=until, on_report=on_report))
        except PenstockError as error:  # a program prints its frames, which are of Prefect, and the error has all that it means
            raise error.with_traceback(None) from None


class RunResult(dict[str, Any]):
    """What `penstock run --json` prints, with the checkpoints as those of Ray Train."""

    @property
    def checkpoint(self) -> ray.train.Checkpoint | None:
        """The last checkpoint: `as_directory()` is its plain folder, fetched where the storage is remote."""
        return self._checkpoint("last")

    @property
    def best_checkpoint(self) -> ray.train.Checkpoint | None:
        """The best one by `train.checkpoint.best`."""
        return self._checkpoint("best")

    def _checkpoint(self, which: str) -> ray.train.Checkpoint | None:
        uri = self["checkpoints"][which]
        if uri is None:
            return None
        import ray.train  # with pandas, a second
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        if is_local(uri):
            return ray.train.Checkpoint.from_directory(uri)
        files, path = filesystem_of(uri)
        return ray.train.Checkpoint(path, filesystem=PyFileSystem(FSSpecHandler(files)))


def run_loaded(
    loaded: LoadedSpec,
    *,
    fresh: bool = False,
    until: str | None = None,
    on_report: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Run or continue a pipeline whose file is loaded; arguments, result and errors are those of `run`."""
    prepare_environment()
    preflight = Preflight(loaded)
    preflight.ahead(until)
    if loaded.spec.tracking.tracker == "mlflow":
        check_mlflow_answers()

    def perform() -> State[Any]:
        from penstock.flows.pipeline import pipeline
        from penstock.flows.run.request import RunRequest

        given = {"file": str(loaded.file), "overrides": list(loaded.overrides), "fresh": fresh, "until": until}
        request = RunRequest.model_validate(given).made_here(preflight, on_report)
        return pipeline(request, return_state=True)

    return perform_flow(loaded.spec.name, loaded.state_dir, perform)


def perform_flow(name: str, state_dir: Path, perform: Callable[[], State[Any]]) -> dict[str, Any]:
    """Start the servers that the environment does not name, and return the result of a flow that runs in this process.

    Args:
        name: shown while the servers start.
        perform: imports the flow and calls it, with `return_state=True`. Prefect reads its settings when it is imported, so
            that must wait until the server's address is known.
    """
    print(f"{name}: starting", file=sys.stderr, flush=True)
    stopping = StopRequest()
    with raise_interrupted_on_stop(stopping), stopping_on_signals(stopping), prefect_api(state_dir):
        stopping.check()
        from penstock.flows.run.flow_runs import flow_result

        return flow_result(perform)


@contextlib.contextmanager
def raise_interrupted_on_stop(stopping: StopRequest) -> Iterator[None]:
    """Raise Interrupted where Prefect or Ray raises an error of its own after a stop, and announce a stop that takes long.

    Raises:
        Interrupted: in place of any other error, once a stop was requested.
    """
    over = threading.Event()
    threading.Thread(target=_announce_stop, args=(stopping, over), daemon=True).start()
    try:
        yield
    except Exception as error:  # of any class
        if stopping.stop.is_set() and not isinstance(error, Interrupted):
            raise Interrupted(stopping.signum) from error
        raise
    finally:
        over.set()


def _announce_stop(stopping: StopRequest, over: threading.Event) -> None:
    """Print a line after a signal, unless the block has ended or prints one itself."""
    while not over.wait(_STOP_LOOKS_S):
        if stopping.received:
            if not stopping.graceful:
                print("  stopping: work that has started ends first", file=sys.stderr, flush=True)
            return
