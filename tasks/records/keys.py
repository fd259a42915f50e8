"""What does each stage's output depend on? Its inputs by name, and a digest of them: the stage's key.

Same key and a verified output: the stage is reused. A different key: it runs, and the inputs show what differed.
What is trained is keyed by the rows and their order, not by what they were made from: another address of the same files, or one
corrected label among the held-out rows, trains nothing again. So these keys are known once the rows are prepared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from penstock.config import Section
from penstock.digest import canonical_json, digest_of, stream_digest
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_origin, format_versions
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import SPLITS
from penstock.installed import version_of
from penstock.tasks.project import Project
from penstock.tasks.stages import BEFORE_TRAINING, STAGES, UPSTREAM, StageName
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.registry.registry import REGISTRIES
from penstock.training.spec import TrackingSpec
from penstock.usercode.capture import UserCode

__all__ = ["DECIDES", "StageKey", "changed_inputs", "framework_versions", "short_value", "stage_keys"]

OUTPUT_FORMATS = {"read": 2, "preprocess": 4, "materialize": 4, "shuffle": 2, "train": 2, "evaluate": 4, "register": 3}
"""Raised by one when a stage's own code changes what it writes, so that outputs of an older penstock are not reused."""

_FILES_NAMED = 10_000
"""Most files of a split that a key names one by one, in some hundred bytes each."""

DECIDES = "decides."
"""Prefix of inputs of `register` that decide about the alias, and not what the model is."""

# Fields that change how training is run, not what comes out of it.
_NOT_IN_TRAIN_KEY = (
    "start_from",  # by its content
    "retries",
    "wait_s",
    "stall_s",
    "resources",
    "placement",
    "backend.timeout_s",
    "backend.init_method",
    "checkpoint.every_steps",
    "checkpoint.every_s",
    "checkpoint.every_epoch",
    "checkpoint.keep",
    "checkpoint.keep_best",
)


class StageKey(Section):
    """A stage's key and the named inputs it was made from."""

    stage: str
    key: str
    """Empty while the rows that it depends on are not known."""
    inputs: dict[str, Any]


Outputs = Callable[[StageName, str], dict[str, Any] | None]
"""(stage, key) -> its output if one is on record."""


def stage_keys(project: Project, recorded: Outputs) -> dict[str, StageKey]:
    """Compute the keys of all stages from the spec, the source listing, the user's code, and what is on record; no stage runs.

    The key of `train`, and those after it, stay empty where the rows have not been prepared yet.

    Raises:
        DataError, ServiceError: the sources cannot be listed.
        SpecError: user code cannot be found.
    """
    keys: dict[str, StageKey] = {}
    all_inputs = _inputs(project)
    rows: dict[str, dict[str, Any]] | None = {}
    for stage in STAGES:
        if stage == "train":
            rows = _row_inputs(project, {name: recorded(name, keys[name].key) for name in BEFORE_TRAINING})
        upstream = {f"key.{name}": keys[name].key for name in UPSTREAM[stage]}
        inputs = {"format": OUTPUT_FORMATS[stage], **all_inputs[stage], **(rows or {}).get(stage, {}), **upstream}
        keys[stage] = StageKey(stage=stage, key="" if rows is None else digest_of([stage, inputs]), inputs=inputs)
    return keys


def _row_inputs(project: Project, outputs: Mapping[str, dict[str, Any] | None]) -> dict[str, dict[str, Any]] | None:
    """Return the key inputs that later stages take from the prepared rows; None if these are not on record."""
    fitted, prepared, shuffled = (outputs[name] for name in ("preprocess", "materialize", "shuffle"))
    if fitted is None or prepared is None or shuffled is None:
        return None
    spec, manifest = project.spec, DatasetManifest.model_validate(prepared)
    held_out = {f"rows.{split}": manifest.split_digests[split] for split in SPLITS[1:]}
    decides = {"rows.validation": held_out["rows.validation"]} if spec.train.checkpoint.best is not None else {}
    return {
        "train": {
            "rows.train": manifest.split_digests["train"],
            "rows.schema": digest_of(manifest.feed_schema.model_dump(mode="json")),
            "rows.order": shuffled["fingerprint"],
            "rows.seed": spec.shuffle.seed,
            # It may train on them.
            **{f"rows.datasets.{name}": manifest.split_digests.get(name) for name in spec.data.datasets},
            "rows.streamed": spec.materialize.cache == "none",  # windows of a stream are others than those of stored rows
            **decides,
        },
        "evaluate": held_out,
        "register": {
            "rows.fitted": digest_of(fitted),
            **({f"{DECIDES}{name}": value for name, value in held_out.items()} if spec.register_.promote is not None else {}),
        },
    }


def framework_versions(project: Project) -> dict[str, str]:
    """Distribution -> version, of the framework's libraries and of the package that adds it."""
    found = {name: version_of(name) for name in project.framework.libraries}
    return found | _package_of(FRAMEWORKS.origin(project.spec.train.framework))


def changed_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name every input that differs between two runs of a stage, with both values, upstream keys left out."""
    found: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after or name.startswith("key."):
            continue
        line = f"{name}: {short_value(before)} -> {short_value(after)}"
        if isinstance(before, dict | None) and isinstance(after, dict | None):
            found += _changed_members("code" if name.startswith("code.") else name, before or {}, after or {}) or [line]
        else:
            found.append(line)
    return list(dict.fromkeys(found))  # two targets may reach one definition


def _changed_members(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    groups = (
        ("added", sorted(after.keys() - before.keys())),
        ("removed", sorted(before.keys() - after.keys())),
        ("changed", sorted(k for k in before.keys() & after.keys() if before[k] != after[k])),
    )
    return [
        f"{name}: {verb} {', '.join(members[:3])}" + (f" and {len(members) - 3} more" if len(members) > 3 else "")
        for verb, members in groups
        if members
    ]


def short_value(value: Any) -> str:
    """Format a value in at most 60 characters, a digest in 8."""
    text = "(none)" if value is None else str(value)
    if re.fullmatch("[0-9a-f]{32}", text):
        return text[:8]
    return text if len(text) <= 60 else f"{text[:57]}..."


def _inputs(project: Project) -> dict[str, dict[str, Any]]:
    spec = project.spec
    data, train, registry = spec.data, spec.train, spec.tracking.registry
    transforms = _code_inputs(project.transforms)
    # Where the files lie does not count: their listing does.
    elsewhere = {
        "label",
        "invalid",
        "duplicates",
        "any_type",
        "datasets",
        *(split for split in SPLITS if isinstance(getattr(data, split), str)),
    }
    leaves = dict(_leaves(data))
    read = {f"data.{k}": v for k, v in leaves.items() if not k.startswith("images.") and k not in elsewhere}
    read |= {f"version.{n}": v for n, v in format_versions(data).items()}
    read |= {"version.format": added} if (added := format_origin(data)) else {}
    files = _files(project.files)
    states = sorted({f.state for f in project.files if f.state})
    source = {"files": files, **({"states": states} if states else {})}
    # Slices are of columns that the prepared rows may lack.
    slices = {"source": digest_of([read, source])} if spec.evaluate.slices else {}
    floors = {**slices, "evaluate.slices": spec.evaluate.slices}
    lanes = {"shuffle.lanes of batch_rows": spec.shuffle.most_lanes(train.lane_batch_rows)}
    images = {f"data.{k}": v for k, v in leaves.items() if k.startswith("images.")}
    return {
        "read": {**read, **source, "version.pyarrow": version_of("pyarrow")},
        "preprocess": {
            "data.label": data.label,
            "data.invalid": data.invalid,
            **({"data.any_type": True} if data.any_type else {}),
            **images,
            **{f"preprocess.{i}": step.model_dump(mode="json", exclude_none=True) for i, step in enumerate(spec.preprocess)},
            **{f"version.transform.{step.kind}": step.origin for step in spec.preprocess if step.origin is not None},
            **transforms,
            "version.numpy": version_of("numpy"),
        },
        "materialize": {f"materialize.{k}": v for k, v in _leaves(spec.materialize)}
        | {"materialize.overlap": spec.overlaps}  # digests of splits are of other things
        | {"data.duplicates": data.duplicates}
        | {
            "version.pyarrow": version_of("pyarrow").split(".")[0],
            "version.pillow": version_of("pillow"),
            "version.simplejpeg": version_of("simplejpeg"),
            "version.torch": version_of("torch").split("+")[0],
        },
        "shuffle": {f"shuffle.{k}": v for k, v in _leaves(spec.shuffle)} | (lanes if spec.shuffle.lanes == "auto" else {}),
        "train": {
            **{f"train.{k}": v for k, v in _leaves(train) if k not in _NOT_IN_TRAIN_KEY},
            **({"start_from": project.start_from.digest} if project.start_from is not None else {}),
            **_code_inputs({train.recipe: project.recipe} if train.recipe else {}),
            **_code_inputs({config.target: config} if (config := project.data_config) is not None else {}),
            **_code_inputs({each.name: each.code for each in project.callbacks if each.code is not None}),
            **{f"version.callback.{each.name}": each.origin for each in project.callbacks if each.origin is not None},
            **{f"version.{n}": v for n, v in framework_versions(project).items()},
        },
        "evaluate": {f"evaluate.{k}": v for k, v in _leaves(spec.evaluate)}
        | {"version.torchmetrics": version_of("torchmetrics"), **slices},
        "register": {
            # The model keeps how raw rows are read and prepared.
            **read,
            **images,
            **transforms,
            **({f"{DECIDES}{name}": value for name, value in floors.items()} if spec.register_.promote is not None else {}),
            "data.label": data.label,
            **{f"register.{k}": v for k, v in _leaves(spec.register_)},
            "name": spec.name,
            **({"registry": registry} if registry != TrackingSpec().registry else {}),
            **{f"version.{n}": version_of(n) for n in project.registry.libraries},
            **{f"version.{n}": v for n, v in _package_of(REGISTRIES.origin(registry)).items()},
        },
    }


def _files(files: Sequence[SourceFile]) -> dict[str, str]:
    """Name each file with its content; of a split with more than some thousand all as one, as every run's record holds them."""
    found: dict[str, str] = {}
    for location, some in itertools.groupby(files, lambda file: file.location):
        if len(of_split := [*some]) <= _FILES_NAMED:
            found |= {f"{location}/{f.name}": f"{f.size_bytes}:{f.fingerprint}" for f in of_split}
        else:
            digest = stream_digest(canonical_json([f.name, f.size_bytes, f.fingerprint]).encode() for f in of_split)
            found[f"{location}/*"] = digest
    return found


def _code_inputs(codes: Mapping[str, UserCode]) -> dict[str, Any]:
    """Return what each target reaches, and the versions that it imports."""
    reached = {f"code.{target}": user.reached for target, user in codes.items()}
    return reached | {f"version.{n}": v for user in codes.values() for n, v in user.versions.items()}


def _package_of(origin: str | None) -> dict[str, str]:
    """Distribution -> version from `Plugins.origin`; nothing for what penstock brings."""
    name, _, version_ = (origin or "").partition("==")
    return {name: version_} if name else {}


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            dumped = section.model_dump(mode="json", include={name})[name]
            yield f"{prefix}{name}", dumped
