"""Which classes does a cached dataset hold, and what should be said of them?"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.spec import DataSpec, SplitRule
from penstock.messages import shorten

_CLASSES_NAMED = 10


def _class_rows(manifest: DatasetManifest, split: Split) -> dict[int, int]:
    """Rows of each class of the split; nothing where the label is no class."""
    return {int(label): rows for label, rows in manifest.extra.get("class_counts", {}).get(split, {}).items()}


def _class_names(manifest: DatasetManifest, labels: Sequence[int]) -> list[str]:
    names = manifest.feed_schema.classes or ()
    return [shorten(names[label]) if label < len(names) else str(label) for label in labels]


def untried_classes(manifest: DatasetManifest) -> str:
    """What to say of classes that only train has: a name that is misspelt in some rows looks like this."""
    train, *held_out = (_class_rows(manifest, split) for split in SPLITS)
    tried = {label for rows in held_out for label in rows}
    untried = sorted(train.keys() - tried, key=lambda label: (train[label], label))
    if not tried or not untried:
        return ""
    names = _class_names(manifest, untried[:_CLASSES_NAMED])
    named = [
        f"{name} ({train[label]:,} row{'s' if train[label] != 1 else ''})" for name, label in zip(names, untried, strict=False)
    ]
    label = manifest.feed_schema.label
    advice = "where one is another class misspelt" if manifest.feed_schema.classes else "where one is a mistake"
    quantity = "" if manifest.feed_schema.classes else f"; if {label!r} is a quantity, cast: {{{label}: float32}}"
    return (
        f"{len(untried):,} of {len(train):,} classes of {label!r} {'have' if len(untried) > 1 else 'has'} no row in validation "
        f"or test, so that no metric covers {'them' if len(untried) > 1 else 'it'}: {_some(named, len(untried))}; {advice}, "
        f"correct its rows at their source{quantity}"
    )


def one_class(manifest: DatasetManifest) -> str:
    """What to say where train has one class only: there is nothing to tell apart."""
    rows = _class_rows(manifest, "train")
    if len(rows) != 1:
        return ""
    (name,) = _class_names(manifest, list(rows))
    label = manifest.feed_schema.label
    return (
        f"all {manifest.rows['train']:,} rows of train are of one class of {label!r}, {name}: every metric will be perfect and "
        "say nothing; check the label, data.train and the rules of the other splits"
    )


def refuse_no_choice(manifest: DatasetManifest) -> None:
    """Raise DataError where a label can be one thing only: nothing can be learned of it, and no metric is defined."""
    if manifest.feed_schema.num_classes != 1:
        return
    name = "".join(_class_names(manifest, list(_class_rows(manifest, "train"))))
    raise DataError(
        f"the label {manifest.feed_schema.label!r} has one class{name and f', {name},'} in all {manifest.rows['train']:,} rows "
        "of train; a class is chosen among two at least",
        next_step="check the label, data.train and the rules of the other splits; without data.label nothing is classified",
    )


def empty_splits(manifest: DatasetManifest, data: DataSpec) -> list[str]:
    """What to say of each split that the pipeline file asks for and that has no rows."""
    found = []
    for split in SPLITS[1:]:
        rule = getattr(data, split)
        if rule is None or manifest.rows.get(split):
            continue
        by = f": its rule goes by {rule.by}, which has few values" if isinstance(rule, SplitRule) and rule.columns else ""
        found.append(
            f"data.{split} is given and holds no rows{by}; nothing is evaluated on it. Raise its fraction, or name files"
        )
    return found


def _some(names: list[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - len(names):,} more" if count > len(names) else "")


def classes_text(manifest: DatasetManifest) -> str:
    """The classes of train, the largest first."""
    rows = _class_rows(manifest, "train")
    largest = sorted(rows, key=lambda label: (-rows[label], label))[:_CLASSES_NAMED]
    names = _class_names(manifest, largest)
    return _some([f"{name} {rows[label]:,}" for name, label in zip(names, largest, strict=True)], len(rows))
