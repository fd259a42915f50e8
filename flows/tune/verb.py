"""How does the command make a sweep? Servers up, flow called in this process, and its end turned into a result or an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.flows.preflight.checks import Preflight
from penstock.flows.servers.services import prefect_api, prepare_environment
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.run import raise_interrupted_on_stop
from penstock.lease import refuse_if_held
from penstock.machine.stopping import StopRequest, stopping_on_signals
from penstock.storage import Storage
from penstock.stores import is_local
from penstock.tasks.records.ledger import sweep_lease_path

__all__ = ["make_sweep"]


def make_sweep(file: Path | str, overrides: Sequence[str] = (), *, fresh: bool = False) -> dict[str, Any]:
    """Make or continue the sweep of a pipeline in this process and return what `penstock tune --json` prints.

    Args:
        file: the pipeline file, or its folder.
        overrides: changes of single values, such as `tune.trials=20`.
        fresh: start a new sweep instead of continuing the last one.

    Raises:
        PenstockError: what stopped the sweep.
    """
    prepare_environment()
    loaded = load_spec(Path(file), list(overrides))
    Preflight(loaded).ahead()
    if is_local(loaded.spec.storage):
        refuse_if_held(Storage(loaded.spec.storage), sweep_lease_path(loaded.spec.name))
    print(f"{loaded.spec.name}: starting", file=sys.stderr, flush=True)
    stopping = StopRequest()
    with raise_interrupted_on_stop(stopping), stopping_on_signals(stopping), prefect_api(loaded.state_dir):
        stopping.check()
        # Prefect reads its settings when imported, so it comes after the server's address is known.
        from penstock.flows.run.flow_runs import flow_result
        from penstock.flows.tune.flow import TuneRequest
        from penstock.flows.tune.flow import tune as tune_flow

        request = TuneRequest(file=str(loaded.file), overrides=list(overrides), fresh=fresh)
        return flow_result(lambda: tune_flow(request, return_state=True))
