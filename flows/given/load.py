"""Load a spec with the function and the rows that a program gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.flows.given.code import GivenCode
from penstock.flows.spec_file import GIVEN, LoadedSpec, as_override, load_spec, spec_path
from penstock.ingest.formats.arrow_files import keep_object
from penstock.ingest.schema import SPLITS
from penstock.messages import shorten
from penstock.storage import Storage
from penstock.training.spec import split_names

__all__ = ["load_given"]


def load_given(
    spec: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    train_func: Callable[..., Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> LoadedSpec:
    """Load a spec with the function and the rows that a program gives; arguments as of `run`.

    Raises:
        SpecError: the spec is wrong, or code cannot be written down.
        DataError: `data` holds something other than rows.
    """
    changes = [*overrides]
    if isinstance(spec, Mapping):
        for key, given in (("train", train_func), ("data", data)):
            if given is not None and not isinstance(spec.get(key, {}), Mapping):
                raise SpecError(f"spec.{key} is not a dict: {shorten(spec[key])}", next_step=f"leave {key} out, or give a dict")
        spec = spec if train_func is None else {**spec, "train": {**spec.get("train", {}), "loop": train_func}}
    elif train_func is not None:
        file = spec_path(spec)
        code = GivenCode(file.parent, f"{GIVEN}/{file.stem}")
        changes.append(as_override("train.loop", code.target(train_func, is_loop=True)))
    if data is None:
        return load_spec(spec, changes)
    splits = split_names({})  # `valid` and `val`, too
    places = [splits.get(name, name) for name in data]
    if "train" not in places or len({*places}) < len(places):
        raise SpecError(
            f"data={{...}} has {', '.join(map(str, data)) or 'nothing'}; it takes train, and optionally validation, test and "
            "datasets of other names, each once",
            next_step='call run(file, data={"train": rows})',
        )

    def with_rows_at(uris: Sequence[str], is_draft: bool = False) -> LoadedSpec:
        found = dict(zip(places, uris, strict=True))
        section = {"format": "arrow", **{name: uri for name, uri in found.items() if name in SPLITS}}
        further: dict[str, Any] = {name: uri for name, uri in found.items() if name not in SPLITS}
        if isinstance(spec, Mapping):
            known = spec.get("data", {})
            further = {"datasets": {**known.get("datasets", {}), **further}} if further else {}
            return load_spec({**spec, "data": {**known, **section, **further}}, changes, is_draft=is_draft)
        section |= {f"datasets.{name}": uri for name, uri in further.items()}
        return load_spec(spec, [*changes, *(as_override(f"data.{name}", uri) for name, uri in section.items())])

    storage = Storage(with_rows_at(["given"] * len(places), is_draft=True).spec.storage)
    return with_rows_at([keep_object(rows, storage, f"data[{name!r}]") for name, rows in data.items()])
