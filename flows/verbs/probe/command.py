"""The verb `probe` of the command: its arguments and its help."""

from __future__ import annotations

from typing import Any

from penstock.flows.answer import answer, print_line
from penstock.flows.options import HERE, File, Json, Set

__all__ = ["probe"]


def probe(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Measure how fast rows reach the workers and where the time goes."""

    def work() -> dict[str, Any]:
        from penstock.flows.spec_file import load_spec

        loaded = load_spec(file, overrides or [])
        loaded.project.check_start()  # before libraries are loaded that take seconds
        from penstock.flows.verbs.probe.probe import probe_pipeline

        return probe_pipeline(loaded, print_line)

    answer(work, as_json)
