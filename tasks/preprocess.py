"""The preprocess stage: what do the transforms learn from the train split?"""

from __future__ import annotations

from typing import Any

from penstock.ingest.preprocess.fit import fit_preprocess, needs_fit
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.stage import Facts, Stage

__all__ = ["STAGE"]


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    if needs_fit(spec.preprocess):
        ctx.need_ray()
    fitted = fit_preprocess(
        spec.data, spec.preprocess, ctx.snapshot, ctx.project.transforms, ctx.reporter.progress("preprocess")
    )
    return fitted.model_dump(mode="json"), "ran"


def _facts(output: dict[str, Any]) -> Facts:
    fitted = FittedPreprocess.model_validate(output)
    return (("transforms", str(len(fitted.steps))),)


STAGE = Stage("preprocess", _run, _facts)
