"""Give an alias back to the version that held it before."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import ServiceError, SpecError
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.status import state_of
from penstock.lease import LeaseHolder, hold_lease
from penstock.training.registry.registry import PREVIOUS, REGISTRIES, KeepsAliases, alias_lease
from penstock.training.spec import TrackingSpec

__all__ = ["roll_back", "show_rollback"]


def roll_back(file: Path | None, name: str) -> dict[str, Any]:
    """Swap the alias with that of the version before; return what `penstock rollback --json` prints. A second call undoes it.

    The version that loses the alias is marked: no later run gives the alias to its weights.

    Raises:
        SpecError: the registry keeps no aliases, or has nothing to go back to.
        ServiceError: the registry does not answer.
    """
    storage, state_dir, _ = state_of(file)
    name, at, given = name.removeprefix("models:/").partition("@")
    alias = given if at else None
    beside = file or Path("pipeline.yaml")
    known = load_spec(beside, []).spec.tracking.registry if beside.exists() else TrackingSpec().registry
    registry = REGISTRIES.get(known)
    if not isinstance(registry, KeepsAliases):
        raise SpecError(f"the registry {known!r} keeps no aliases that penstock could move")
    uri = registry.default_uri(state_dir)
    found = sorted(each for each in registry.aliases(uri, name) if not each.endswith(PREVIOUS))
    if alias is None and len(found) != 1:
        if not found:
            raise SpecError(f"there is no model {name!r} with an alias", next_step="penstock log lists the models of a project")
        several = ", ".join(found)
        raise SpecError(f"model {name!r} has the aliases {several}", next_step=f"name one: penstock rollback {name}@{found[0]}")
    alias = alias or found[0]
    with contextlib.ExitStack() as stack:
        # A run that moves the alias now must not undo this. An unreachable storage does not prevent a rollback.
        with contextlib.suppress(OSError, ServiceError):
            stack.enter_context(hold_lease(storage, alias_lease(name), brief=True, on_wait=_say_waiting))
        version, lost = registry.roll_back(uri, name, alias)
    return {"status": "done", "name": name, "alias": alias, "version": version, "rolled_back": lost}


def _say_waiting(holder: LeaseHolder) -> None:
    print(f"waiting for a run that moves the alias: {holder.process}", file=sys.stderr)


def show_rollback(result: dict[str, Any], console: Console) -> None:
    """Print the versions of both aliases."""
    console.print(
        f"{result['name']}@{result['alias']} is version {result['version']} again; version {result['rolled_back']} is now "
        f"{result['alias'] + PREVIOUS!r}, and gets the alias back by the same command only"
    )
