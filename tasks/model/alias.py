"""Does the alias move to the new version? Always, unless `register.promote` decides, and never to what was rolled back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from penstock.config import Section
from penstock.digest import digest_of
from penstock.errors import SpecError
from penstock.plugins import needed
from penstock.tasks.context import RunContext
from penstock.training.registry.registry import KeepsAliases, Registered

__all__ = ["REPORTED", "Promotion", "keeps_aliases", "promote"]

REPORTED = "penstock.reported"
"""Tag of a function's version: `metrics` that it reported with the checkpoint, and `rows`, the digest of the held-out ones."""


class Promotion(Section):
    """Whether a version got the alias, and why. Part of the register stage's record."""

    moved: bool
    reason: str
    """One sentence."""
    holder: str | None = None
    """The version that held the alias."""
    metric: str | None = None
    before: float | None = None
    after: float | None = None
    low: float | None = None
    """Ends of the 95 % interval of `after - before`, by a paired bootstrap over the rows."""
    high: float | None = None
    rows: int | None = None


def keeps_aliases(ctx: RunContext) -> KeepsAliases | None:
    """Return the registry if aliases can be looked up and moved there.

    Raises:
        SpecError: they cannot, and `register.promote` asks for it.
    """
    registry = ctx.project.registry
    if isinstance(registry, KeepsAliases):
        return registry
    if ctx.project.spec.register_.promote is not None:
        raise SpecError(
            f"register.promote needs a registry that keeps aliases, and {ctx.project.spec.tracking.registry!r} does not",
            next_step="leave register.promote out, or use tracking.registry: mlflow",
        )
    return None


def promote(ctx: RunContext, uri: str, new: Registered, weights_digest: str, reported: Mapping[str, float | None]) -> Promotion:
    """Decide whether the alias of the spec moves, and move it if so.

    Args:
        uri: of the registry.
        new: the version, which is registered and has no alias of this run yet.
        weights_digest: of its weights.
        reported: metrics of its checkpoint.

    Raises:
        ServiceError: the registry does not answer.
        SpecError: the metric is unknown or does not fit the label.
    """
    spec, registry = ctx.project.spec.register_, cast("KeepsAliases", keeps_aliases(ctx))
    alias = str(spec.alias)
    digests, rows = ctx.manifest.split_digests, ctx.manifest.rows
    held_out = {name: digest for name, digest in digests.items() if name != "train" and rows.get(name)}
    report = {"metrics": dict(reported), "rows": digest_of(held_out or ctx.manifest.content_digest)}
    found = _decide(ctx, registry, uri, new, weights_digest, report)
    # During the comparison a pipeline of another storage (the lease is of this one) or a person may have moved it.
    while found.moved and registry.aliases(uri, new.name).get(alias) != found.holder:
        found = _decide(ctx, registry, uri, new, weights_digest, report)
    sentence = f"alias {alias!r} {'moves to' if found.moved else 'is not given to'} version {new.version}: {found.reason}"
    if found.moved and found.holder == new.version:
        sentence = f"alias {alias!r} is at version {new.version} already: {found.reason}"
    found = found.model_copy(update={"reason": sentence})
    kept = {REPORTED: json.dumps(report)} if ctx.project.spec.train.loop is not None else {}
    registry.tag(uri, new.name, new.version, {"penstock.promotion": sentence, **kept})
    if found.moved:
        ctx.ledger.note_alias(ctx.run, new.name, alias)
        registry.give_alias(uri, new.name, alias, new.version)
    ctx.tracker.set_tags({"penstock.promotion": sentence})
    ctx.reporter.report(sentence)
    return found


def _decide(
    ctx: RunContext, registry: KeepsAliases, uri: str, new: Registered, weights_digest: str, report: Mapping[str, Any]
) -> Promotion:
    spec = ctx.project.spec.register_
    alias = str(spec.alias)
    holder = registry.aliases(uri, new.name).get(alias)
    when = registry.rolled_back(uri, new.name, alias, weights_digest)
    if when is not None and holder != new.version:
        reason = f"its weights were rolled back at {when}; `penstock rollback {new.name}` once more gives them the alias again"
        return Promotion(moved=False, reason=reason, holder=holder)
    if spec.promote is not None:
        decide = needed("penstock.tasks.promote.decide:decide", "register.promote")
        return decide(ctx, registry, uri, new, holder, report)  # type: ignore[no-any-return]
    reason = "nothing is to be compared" if holder == new.version else "register.promote is not set"
    return Promotion(moved=True, reason=reason, holder=holder)
