"""The register stage: the model under its name, with signature, input example, lineage and alias."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.digest import digest_of
from penstock.errors import DataError, ServiceError
from penstock.ingest.preprocess.chain import Chain, split_rows
from penstock.ingest.schema import SPLITS, Split
from penstock.lease import hold_lease
from penstock.messages import counted
from penstock.redact import redact_text
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.evaluate import model_checkpoint
from penstock.tasks.model.alias import keeps_aliases, promote
from penstock.tasks.model.held_out import HeldOut, held_out_of
from penstock.tasks.prepare import preparation_of
from penstock.tasks.records.keys import DECIDES
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.stage import Facts, Stage, VerifyContext
from penstock.tasks.train import model_spec, other_weights, trusted_checkpoint
from penstock.training.model import ModelSpec
from penstock.training.registry.raw_rows import raw_form
from penstock.training.registry.registry import WEIGHTS_TAG, KeepsAliases, TrainedVersion, alias_lease

__all__ = ["STAGE", "describe", "other_answers"]

EXAMPLE_ROWS = 4

_CHECKED_ROWS = 32
"""Held-out rows whose answers are compared with those of the evaluate stage."""

_ROUNDING = 1e-2
"""Largest difference of a share, or of a value as a part of the largest one, that another device or batch may make."""

_SEEN_ROWS = 256
"""Rows of a file that are looked at together for some that can be used."""


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    name = spec.register_.name or spec.name
    # Where the registry knows which version holds the alias, `promote` moves it after a comparison.
    decides = spec.register_.alias is not None and keeps_aliases(ctx) is not None
    if spec.register_.alias is not None and not decides:
        ctx.ledger.note_alias(ctx.run, name, spec.register_.alias)
    checkpoint = trusted_checkpoint(ctx.project, ctx.work_storage, model_checkpoint(ctx))
    manifest = ctx.manifest
    example = _example(ctx)
    form = raw_form(spec.data, ctx.fitted, ctx.project.transforms, example)
    inputs = {each: value for each, value in ctx.keys["register"].inputs.items() if not each.startswith(DECIDES)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ctx.project.framework.model_files]
        for file in checkpoint.manifest.files:
            if (place := Path(folder, file)) in files or {*place.parents} & {*files}:
                place.parent.mkdir(parents=True, exist_ok=True)
                checkpoint.storage.get_file(file, place)
        trained = TrainedVersion(
            name=name,
            alias=None if decides else spec.register_.alias,
            # The same inputs can come to other weights: when the last checkpoint was lost and trained again with other workers.
            key=digest_of([inputs, checkpoint.manifest.weights_digest]),
            model=model_spec(ctx).model_copy(update={"code": ctx.project.recipe, "raw": form.model_dump(mode="json")}),
            files=files,
            example=example.drop_columns([form.label] if form.label is not None else []),
            tags={
                "penstock.run": ctx.run.run,
                "penstock.checkpoint": checkpoint.name,
                WEIGHTS_TAG: checkpoint.manifest.weights_digest,
                "penstock.data.digest": manifest.content_digest,
                "penstock.data.uri": ctx.storage.uri(f"datasets/{manifest.key}") if manifest.num_shards else spec.data.train,
                "penstock.code": ctx.project.recipe.digest,
            },
            experiment=spec.name,
            run_name=ctx.run.run,
            description=describe(ctx),
        )
        if warning := other_answers(held_out_of(ctx), partial(ctx.ledger.answers, ctx.run.run), trained.model, Path(folder)):
            ctx.warn(f"register: {warning}")
        registry = ctx.project.registry
        uri = registry.default_uri(ctx.state_dir)
        registered = registry.register(uri, trained, ctx.tracker)
    ctx.tracker.set_tags({"penstock.model": registered.uri})
    promotion = None
    if decides:
        # Two runs that end together, of this pipeline or of another that registers under the same name, must not both be held
        # against the version before them.
        with hold_lease(ctx.storage, alias_lease(registered.name), ctx.stopping.give_up, brief=True):
            promotion = promote(ctx, uri, registered, checkpoint.manifest.weights_digest, checkpoint.manifest.metrics)
    return {
        **registered.model_dump(mode="json"),
        "alias": spec.register_.alias if promotion is None or promotion.moved else None,
        "promotion": promotion.model_dump(mode="json") if promotion is not None else None,
        "tracking_uri": redact_text(uri),
        "weights_digest": checkpoint.manifest.weights_digest,
    }, "ran"


def describe(ctx: RunContext) -> list[str]:
    """Describe result, model and data in a line each, as far as the attempt has reached them; a list shows the first."""
    lines = []
    train, measured = ctx.project.spec.train, ctx.outcomes["evaluate"].output if "evaluate" in ctx.outcomes else None
    if measured is not None:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in sorted(measured["metrics"].items()))
        lines.append(f"Result: {metrics}")
    if "train" in ctx.outcomes:
        trained = ctx.output("train")
        step = measured["step"] if measured is not None else trained["step"]
        best = f", the best by {measured['best_by']}" if measured is not None and measured["best_by"] else ""
        lines.append(
            f"Model: {train.recipe or train.loop or train.framework}, of step {step:,} of {trained['step']:,}{best}; "
            f"{trained['exactness']}"
        )
    if "materialize" in ctx.outcomes:
        facts = dict(ctx.outcomes["materialize"].facts)
        known = [f"{name} {facts[name]}" for name in ("rows", "classes", "rows left out") if name in facts]
        new = [line.removeprefix("data: ") for line in ctx.attempt.changed if line.startswith("data: ")]
        lines.append(f"Data: {', '.join([counted(len(ctx.snapshot.files), 'source file', 'source files'), *known, *new])}")
    return lines


def other_answers(
    held_out: HeldOut, measured: Callable[[Split], pa.Table | None], model: ModelSpec, folder: Path
) -> str | None:
    """Describe how the model answers some raw rows otherwise than the evaluate stage measured; None if it does not.

    Args:
        measured: returns the recorded answers on a split, with `file` and `row` (see `Ledger.answers`).
        folder: of the framework's files; gets the model's description.
    """
    split = next((each for each in SPLITS[1:] if (found := measured(each)) is not None and "file" in found.column_names), None)
    table, origin = next(held_out.raw(split), (None, None)) if split is not None else (None, None)
    if split is None or table is None or origin is None:
        return None
    from penstock.training.registry.loaded_model import MODEL_FILE, LoadedModel  # it loads torch

    names = {file.uri: f"{file.location}/{file.name}" for file in held_out.snapshot.files}
    places = [(names[origin.names[file]], row) for file, row in zip(origin.files.tolist(), origin.rows.tolist(), strict=True)]
    places = places[:_CHECKED_ROWS]
    answers = measured(split)
    assert answers is not None
    files, rows = (pa.array({place[part] for place in places}) for part in (0, 1))
    answers = answers.filter(pc.and_(pc.is_in(answers["file"].cast(pa.string()), files), pc.is_in(answers["row"], rows)))
    known = {(each["file"], each["row"]): each["predicted"] for each in answers.to_pylist()}
    (folder / MODEL_FILE).write_text(model.model_dump_json())
    loaded = LoadedModel(folder)
    given = loaded.predict(table.slice(0, _CHECKED_ROWS), on_error="report").to_dict("records")
    largest = max(map(abs, known.values()), default=0.0)
    wrong = []
    for place, row in zip(places, given, strict=True):
        if row["error"] is not None or place not in known:
            continue
        was, now = known[place], row["prediction"]
        if (shares := row.get("probabilities")) is not None:  # of two classes that are about as likely, either may come first
            differs = max(shares) - shares[int(was)] > _ROUNDING
        else:
            differs = not abs(now - was) <= _ROUNDING * largest
        wrong += [f"{place[0]}, row {place[1]}"] if differs else []
    if not wrong:
        return None
    return (
        f"the registered model answers {len(wrong)} of {counted(len(places), 'row')} otherwise than evaluate measured, first "
        f"{wrong[0]}; see whether predict draws random numbers, or a transform depends on other rows"
    )


def _example(ctx: RunContext) -> pa.Table:
    """Return the first usable rows of the train split, as the source has them."""
    preparation = preparation_of(ctx)
    chain = Chain(preparation.data, preparation.transforms, preparation.fitted, preparation.code)
    files = [file for file in ctx.snapshot.files if file.location == "train"]
    for split, table, origin in split_rows(preparation.data, ctx.snapshot, files, _SEEN_ROWS):
        if split == "train":
            used = chain.prepare(table, origin).origin
            made = Counter(zip(used.files.tolist(), used.rows.tolist(), strict=True))
            rows = [made[place] == 1 for place in zip(origin.files.tolist(), origin.rows.tolist(), strict=True)]
            if any(rows):
                return table.filter(pa.array(rows)).slice(0, EXAMPLE_ROWS)
    if any(entry.kind in ("flat_map", "map_batches") for entry in preparation.transforms):
        raise DataError(
            "the preprocessing makes several rows of each row of the train split, and a registered model answers one row",
            next_step="end the run before it (penstock run FILE --until evaluate), or make the rows before penstock reads them",
        )
    raise DataError("the train split has no rows that can be used any more", next_step="run again; the source has changed")


def _verify(context: VerifyContext, output: dict[str, Any]) -> str | None:
    registry = context.project.registry
    missing = registry.missing(registry.default_uri(context.state_dir), output) or other_weights(context, output)
    if missing is not None or output["alias"] is None:
        return missing
    # Only what penstock moved is moved back: a person who gave the alias to another version keeps it there.
    newest = Ledger(context.project.storage).run_with_alias(context.project.spec.name, output["name"], output["alias"])
    if newest in (None, context.run_id):
        return None
    return f"run {newest} has given alias {output['alias']!r} to its own version since"


def _as_of_now(ctx: RunContext, output: dict[str, Any]) -> dict[str, Any]:
    """With the registry's address and the alias of now: the folder may have moved, and a rollback or a person the alias.

    If the same weights were measured again, such as on corrected labels, the version is described by the new numbers.
    """
    alias, registry = ctx.project.spec.register_.alias, ctx.project.registry
    uri = registry.default_uri(ctx.state_dir)
    output = {**output, "tracking_uri": redact_text(uri)}
    if not isinstance(registry, KeepsAliases):
        return output
    try:
        if ctx.outcomes["evaluate"].outcome == "ran":
            registry.describe(uri, output["name"], output["version"], describe(ctx))
        if alias is None:
            return output
        holder = registry.aliases(uri, output["name"]).get(alias)
    except ServiceError:
        return {**output, "alias": f"{alias}, unless it was moved since: the registry does not answer"}
    if holder == output["version"]:
        return {**output, "alias": alias}
    return {**output, "alias": f"none: {alias} is at {f'version {holder}' if holder is not None else 'no version'}"}


def _facts(output: dict[str, Any]) -> Facts:
    facts = (("model", output["uri"]), ("alias", output.get("alias") or "none"), ("registry", output["tracking_uri"]))
    promotion = output.get("promotion")
    return facts if promotion is None else (*facts, ("promotion", promotion["reason"]))


STAGE = Stage("register", _run, _facts, _verify, of_run=True, as_of_now=_as_of_now)
