"""Which warnings and errors do the classes of a cached dataset need?"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.spec import DataSpec, SplitRule
from penstock.messages import counted, shorten

_CLASSES_NAMED = 10


def untried_classes(manifest: DatasetManifest) -> str:
    """Warn of classes that only train has: a misspelt name in some rows looks like this."""
    train, *held_out = (_class_rows(manifest, split) for split in SPLITS)
    tried = {label for rows in held_out for label in rows}
    untried = sorted(train.keys() - tried, key=lambda label: (train[label], label))
    if not tried or not untried:
        return ""
    names = _class_names(manifest, untried[:_CLASSES_NAMED])
    named = [f"{name} ({counted(train[label], 'row')})" for name, label in zip(names, untried, strict=False)]
    label = manifest.feed_schema.label
    advice = "correct misspelt classes" if manifest.feed_schema.classes else "correct wrong labels"
    quantity = "" if manifest.feed_schema.classes else f"; if {label!r} is a quantity, cast: {{{label}: float32}}"
    return (
        f"{len(untried):,} of {len(train):,} classes of {label!r} {'have' if len(untried) > 1 else 'has'} no row in validation "
        f"or test, so that no metric covers {'them' if len(untried) > 1 else 'it'}: {_list(named, len(untried))}; {advice} "
        f"at their source{quantity}"
    )


def one_class(manifest: DatasetManifest) -> str:
    """Warn of a single class in train."""
    if len(_class_rows(manifest, "train")) != 1:
        return ""
    return f"{_only_class(manifest)}: every metric will be perfect and mean nothing; {_CHECK_LABEL}"


def refuse_no_choice(manifest: DatasetManifest) -> None:
    """Raise DataError for a label with one possible class: nothing can be learnt, and no metric is defined."""
    if manifest.feed_schema.num_classes == 1:
        raise DataError(
            f"{_only_class(manifest)}; a classifier needs at least two",
            next_step=f"{_CHECK_LABEL}; without data.label nothing is classified",
        )


def empty_splits(manifest: DatasetManifest, data: DataSpec) -> list[str]:
    """Warn of each split of the pipeline file that has no rows."""
    found = []
    for split in SPLITS[1:]:
        rule = getattr(data, split)
        if rule is None or manifest.rows.get(split):
            continue
        by = f": its rule uses {rule.by}, which has few values" if isinstance(rule, SplitRule) and rule.columns else ""
        found.append(
            f"data.{split} is given and holds no rows{by}; nothing is evaluated on it. Raise its fraction, or name files"
        )
    return found


def classes_text(manifest: DatasetManifest) -> str:
    """List the classes of train, the largest first."""
    rows = _class_rows(manifest, "train")
    largest = sorted(rows, key=lambda label: (-rows[label], label))[:_CLASSES_NAMED]
    names = _class_names(manifest, largest)
    return _list([f"{name}: {rows[label]:,}" for name, label in zip(names, largest, strict=True)], len(rows))


_CHECK_LABEL = "check the label, data.train and the rules of the other splits"


def _only_class(manifest: DatasetManifest) -> str:
    names = _class_names(manifest, list(_class_rows(manifest, "train")))
    rows, label = manifest.rows["train"], manifest.feed_schema.label
    return f"the label {label!r} has one class{f', {names[0]},' if names else ''} in all {rows:,} rows of train"


def _class_rows(manifest: DatasetManifest, split: Split) -> dict[int, int]:
    """Return the rows of each class of the split; empty if the label is not a class."""
    return {int(label): rows for label, rows in manifest.extra.get("class_counts", {}).get(split, {}).items()}


def _class_names(manifest: DatasetManifest, labels: Sequence[int]) -> list[str]:
    names = manifest.feed_schema.classes or ()
    return [shorten(names[label]) if label < len(names) else str(label) for label in labels]


def _list(names: list[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - len(names):,} more" if count > len(names) else "")
