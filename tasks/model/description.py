"""How is a run described in three lines? Result, model and data, for the pages of the tracker and of the registry."""

from __future__ import annotations

from penstock.messages import counted
from penstock.tasks.context import RunContext

__all__ = ["describe"]


def describe(ctx: RunContext) -> list[str]:
    """Describe result, model and data, as far as the attempt has reached them; a list of versions shows the first."""
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
