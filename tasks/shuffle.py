"""The shuffle stage: in which order will training see the rows?"""

from __future__ import annotations

from typing import Any

from penstock.ingest.manifest import STREAMS, DatasetManifest
from penstock.ingest.shuffle.order import Order, make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.stage import Facts, Stage, VerifyContext

__all__ = ["STAGE", "train_order"]


def train_order(shuffle: ShuffleSpec, manifest: DatasetManifest, batch_rows: int) -> Order:
    """Return the order of a dataset's train split, given its opened manifest.

    Raises:
        SpecError: it has fewer rows than `shuffle.lanes`, or a larger unit of a stream than a lane.
    """
    rows, size_bytes = manifest.parts_of("train")
    return make_order(
        shuffle, manifest.rows.get("train", 0), rows, batch_rows, size_bytes if STREAMS in manifest.extra else None
    )


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    order = train_order(ctx.project.spec.shuffle, ctx.manifest.opened(ctx.storage), ctx.project.spec.train.lane_batch_rows)
    return {"order": order.model_dump(mode="json"), "fingerprint": order.fingerprint}, "ran"


def _verify(context: VerifyContext, output: dict[str, Any]) -> str | None:
    order = Order.model_validate(output["order"])
    if order.shards.count:
        if not context.upstream.get("materialize"):
            return "its rows are prepared again"
        rows = DatasetManifest.model_validate(context.upstream["materialize"]).opened(context.project.storage)
        order = order.of_shards(rows.parts_of("train")[0])
    if order.fingerprint != output["fingerprint"]:
        return f"this version generates another order ({order.fingerprint}) than the recorded one ({output['fingerprint']})"
    return None


def _facts(output: dict[str, Any]) -> Facts:
    order = Order.model_validate(output["order"])
    shown = (("mode", order.mode), ("seed", str(order.seed)), ("rows", f"{order.rows:,}"))
    # A terminal has three; these are for a comparison.
    return (*shown, ("lanes", str(order.lanes)), ("fingerprint", output["fingerprint"]))


STAGE = Stage("shuffle", _run, _facts, _verify)
