"""The stages read and preprocess: which rows do the files hold, and what do the transforms learn from those of train?"""

from __future__ import annotations

from typing import Any

from penstock.ingest.preprocess.fit import fit_preprocess, needs_fit
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.read.inspection import is_much
from penstock.ingest.read.snapshot import SourceSnapshot, read_source
from penstock.ingest.read.strata import with_strata
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.stage import Facts, Stage

__all__ = ["PREPROCESS", "READ"]


def _read(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    data, files = ctx.project.source, ctx.project.files
    parallel = ctx.parallel("read") if is_much(data, files) else None
    if parallel is not None:
        ctx.need_ray()
    # With `cache: none` the rows are prepared in every epoch, and a copy would have to stay as long.
    keep = ctx.project.spec.materialize.cache != "none"
    snapshot = read_source(data, files, ctx.reporter.progress("read"), parallel=parallel, keep=keep)
    return with_strata(data, snapshot, parallel).model_dump(mode="json"), "ran"


def _read_facts(output: dict[str, Any]) -> Facts:
    snapshot = SourceSnapshot.model_validate(output)
    size = sum(file.size_bytes for file in snapshot.files)
    versions = sorted({file.state.replace("-", " ", 1) for file in snapshot.files if file.state})
    return (
        *((snapshot.format, version) for version in versions),
        ("rows", f"{snapshot.rows:,}"),
        ("files", f"{len(snapshot.files):,}"),
        ("size", f"{size / 1e6:,.1f} MB"),
        ("columns", ", ".join(f"{column.name}: {column.type}" for column in snapshot.columns)),
    )


def _preprocess(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    if needs_fit(spec.preprocess):
        ctx.need_ray()
    progress, parallel = ctx.reporter.progress("preprocess"), ctx.parallel("preprocess")
    fitted = fit_preprocess(spec.data, spec.preprocess, ctx.snapshot, ctx.project.transforms, progress, parallel=parallel)
    return fitted.model_dump(mode="json"), "ran"


def _preprocess_facts(output: dict[str, Any]) -> Facts:
    return (("transforms", str(len(FittedPreprocess.model_validate(output).steps))),)


READ = Stage("read", _read, _read_facts)

PREPROCESS = Stage("preprocess", _preprocess, _preprocess_facts)
