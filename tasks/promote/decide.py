"""Is a new version better than the holder of the alias, by `register.promote`, and what is the reason in a sentence?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import DataError, PenstockError, SpecError
from penstock.ingest.schema import METRICS_OF, Split
from penstock.messages import counted
from penstock.tasks.context import RunContext
from penstock.tasks.model.alias import REPORTED, Promotion
from penstock.tasks.model.held_out import held_out_of
from penstock.training.evaluation.paired import Paired
from penstock.training.registry.registry import KeepsAliases, Registered
from penstock.training.spec import PromoteSpec

__all__ = ["below_floors", "decide", "weigh"]


def decide(
    ctx: RunContext, registry: KeepsAliases, uri: str, new: Registered, holder: str | None, report: Mapping[str, Any]
) -> Promotion:
    """Compare a version with the holder of the alias, on the same held-out rows.

    Args:
        uri: of the registry.
        new: the version.
        holder: the version that has the alias.
        report: of the version, as its tag `REPORTED` holds it.

    Raises:
        ServiceError: the registry does not answer.
        SpecError: the metric is unknown or does not fit the label.
    """
    policy = ctx.project.spec.register_.promote
    assert policy is not None
    move = policy.otherwise == "move"
    below = below_floors(policy, ctx.output("evaluate").get("slices", []))
    if holder == new.version:
        return Promotion(moved=True, reason=below or "nothing is to be compared", holder=holder)
    if below:
        return Promotion(moved=False, reason=below, holder=holder, metric=policy.metric)
    if holder is None:
        return Promotion(moved=True, reason="no version held it", metric=policy.metric)
    try:
        if policy.is_reported:
            return _by_reports(policy, holder, report, registry.tags(uri, new.name, holder))
        from penstock.tasks.promote.compare import compare_models  # it loads pandas

        split, metric = _split_and_name(policy)
        models = [registry.load(uri, new.name, version) for version in (new.version, holder)]
        compared = compare_models(models[0], models[1], metric, (rows for rows, _ in held_out_of(ctx).raw(split)))
    except SpecError:
        raise
    except PenstockError as error:
        reason = f"version {holder}, which holds it, cannot be compared: {error.message}"
        reason += "; register.promote.otherwise is move" if move else "; register.promote.otherwise: move would move it"
        return Promotion(moved=move, reason=reason, holder=holder, metric=policy.metric)
    paired = compared.paired
    moved, reason = weigh(policy, paired, new.version, holder)
    if compared.cut:
        reason += "; these are the first of them"
    if compared.unanswered:
        reason += f"; version {holder} has no answer to {compared.unanswered:,} more"
    if compared.neither:
        reason += f"; neither version has an answer to {counted(compared.neither, 'row')}"
    if compared.lost:
        reason += f"; version {new.version} has no answer to {counted(compared.lost, 'row')} that version {holder} answers"
        reason += "" if move or not moved else ", so it stays; register.promote.otherwise: move would move it"
        moved = moved and move
    numbers = {each: value for each, value in paired._asdict().items() if not math.isnan(value)}
    return Promotion(moved=moved, reason=reason, holder=holder, metric=policy.metric, **numbers)


def _by_reports(policy: PromoteSpec, holder: str, report: Mapping[str, Any], tags: Mapping[str, str]) -> Promotion:
    """Weigh what two functions have reported of their checkpoints.

    Raises:
        DataError: the holder's function has not reported it, or had other held-out rows.
    """
    of_holder = json.loads(tags.get(REPORTED, "{}"))
    after, before = report["metrics"].get(policy.metric), of_holder.get("metrics", {}).get(policy.metric)
    if after is None:
        reason = f"{policy.metric!r} was not reported with its checkpoint"
        return Promotion(moved=False, reason=reason, holder=holder, metric=policy.metric)
    if before is None:
        raise DataError(f"{policy.metric!r} was not reported with its checkpoint")
    if of_holder["rows"] != report["rows"]:
        raise DataError(f"its {policy.metric} {before:.4f} was reported on other held-out rows (now: {after:.4f})")
    sentence = f"reported {policy.metric} {after:.4f}, where version {holder} has {before:.4f} ({after - before:+.4f})"
    moved, reason = _is_gain(policy, before, after, sentence)
    return Promotion(moved=moved, reason=reason, holder=holder, metric=policy.metric, before=before, after=after)


def weigh(policy: PromoteSpec, paired: Paired, new: str, holder: str) -> tuple[bool, str]:
    """Return whether version `new` is better than `holder` by as much as the policy asks for, and why, as a sentence."""
    sentence = f"{policy.metric} {paired.after:.4f}, where version {holder} has {paired.before:.4f} ({paired.difference:+.4f}"
    if not math.isnan(paired.low):
        sentence += f", 95 % interval [{paired.low:+.4f}, {paired.high:+.4f}]"
    sentence += f") on the same {counted(paired.rows, 'row')}"
    return _is_gain(policy, paired.before, paired.after, sentence)


def _is_gain(policy: PromoteSpec, before: float, after: float, sentence: str) -> tuple[bool, str]:
    gain = before - after if policy.lower_is_better else after - before
    if not gain > 0:
        return False, f"{sentence}: it is not better"
    if not _reaches(gain, policy.min_gain, max(abs(before), abs(after))):
        return False, f"{sentence}: the gain is below register.promote.min_gain {policy.min_gain:g}"
    return True, sentence


def _reaches(value: float, bound: float, size: float) -> bool:
    """Return whether a value is at least the bound, within the rounding of metrics of about `size`, which are float32."""
    return value >= bound - 1e-6 * size


def _split_and_name(policy: PromoteSpec) -> tuple[Split, str]:
    prefix, _, name = policy.metric.partition("/")
    return next(split for split, own in METRICS_OF.items() if own == prefix), name


def below_floors(policy: PromoteSpec, slices: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the slices of the new model that are worse than their floor, as a sentence; None if there are none.

    Args:
        slices: entries with `split`, `column`, `slice`, `rows` and metrics by name, as the evaluate stage lists them.
    """
    if not policy.floors:
        return None
    split, name = _split_and_name(policy)
    sign = -1 if policy.lower_is_better else 1
    broken = []
    for key, floor in policy.floors.items():
        meant = [each for each in slices if each["split"] == split and key in (each["slice"], each["column"])]
        if not meant:
            broken.append(f"{split} has no slice {key!r} to compare with its floor")
        for each in meant:
            value = each.get(name)
            undefined = name in each and value is None
            if undefined and key != each["slice"] and any(other[name] is not None for other in meant):
                continue  # few rows of one class do not count against a model; a slice with a floor of its own is measured
            if value is None or not _reaches(sign * value, sign * floor, abs(floor)):
                why = f"is not defined ({each['not_defined']})" if undefined else "is not measured"
                shown = why if value is None else f"is {value:.4f}"
                where = f"{policy.metric} {shown} on the {counted(each['rows'], 'row')} of {each['slice']}"
                broken.append(f"{where}, its floor is {floor:g}")
    return "; ".join(broken) or None
