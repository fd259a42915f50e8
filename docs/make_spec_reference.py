"""Writes docs/spec.md from the spec's own models, so that the reference cannot differ from the code.

Usage: python docs/make_spec_reference.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.config import OnResume, Section
from penstock.ingest.formats.section import described_data_spec
from penstock.ingest.spec import DataSpec
from penstock.tasks.spec import PipelineSpec

INTRO = """\
# The pipeline file

One YAML file describes a pipeline. Unknown keys are errors, and every problem is reported with its line. `penstock schema`
prints a JSON Schema of it, which the files made by `penstock init` name in their first line, so that editors complete keys.

*On resume* says what a changed field means to a run that has a checkpoint and is not finished: **free** changes nothing that
was promised, **warn** goes on with a warning and may cost bit-exactness, **forbidden** is refused (`penstock run FILE --fresh`
begins a new run instead). A change above `train` is forbidden if it changes the train rows or their order. Another version of a
library, a field of `materialize` or other held-out files are accepted if the prepared train rows come out the same.

`--set a.b=value` overrides one value and may be repeated: `penstock run pipeline.yaml --set train.epochs=3 --set
'train.params={hidden: 64}'`. A number names an item of a list: `--set preprocess.0.imputer.strategy=mean`.

This page is generated from the code: `python docs/make_spec_reference.py`.
"""


def main(target: Path) -> None:
    """Write the page."""
    target.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """The page's text."""
    sections: dict[type[Section], list[str]] = {}
    described = described_data_spec()
    queue: list[tuple[str, type[Section]]] = [("", PipelineSpec)]
    while queue:
        path, model = queue.pop(0)
        if path not in sections.setdefault(model, []):
            sections[model].append(path)
            for name, info in model.in_file().items():
                key = f"{path}.{name}" if path else name
                queue += [(key, described if inner is DataSpec else inner) for inner in _sections(info.annotation)]
    return "\n".join([INTRO, *(line for model, paths in sections.items() for line in _section(paths, model))]) + "\n"


def _section(paths: list[str], model: type[Section]) -> Iterator[str]:
    """A section that may stand in several places, such as a held-out split."""
    title = ", ".join(f"`{path}`" for path in paths) if paths[0] else "The file"
    yield f"\n## {title}\n\n{_first_paragraph(model)}\n"
    yield "| key | type | default | on resume | meaning |\n|---|---|---|---|---|"
    for name, info in model.in_file().items():
        cells = (f"`{name}`", _type_of(info.annotation), _default(info), _rule(paths[0], info), _cell(info.description))
        yield f"| {' | '.join(cells)} |"


def _first_paragraph(model: type[Section]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _type_of(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    inner = [a for a in get_args(annotation) if not isinstance(a, OnResume)]
    origin = getattr(annotation, "__origin__", None)
    if origin is list:
        return f"list of {_type_of(inner[0])}"
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return "[" + ", ".join(_type_of(a) for a in inner) + "]"
    if "Literal" in str(origin):
        return " \\| ".join(f"`{value}`" for value in inner)
    if hasattr(annotation, "__metadata__"):
        return _type_of(inner[0])
    if inner:
        return " \\| ".join(_type_of(a) for a in inner)
    return getattr(annotation, "__name__", str(annotation))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "*needed*"
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, Section):
        return "see below"
    if value is None:
        return "none"
    return f"`{json.dumps(value) if isinstance(value, bool | tuple) else value}`"


def _rule(path: str, info: FieldInfo) -> str:
    if not path.startswith("train"):
        return "" if path else next((m.value for m in info.metadata if isinstance(m, OnResume)), "")
    if any(True for _ in _sections(info.annotation)) and not any(isinstance(m, OnResume) for m in info.metadata):
        return ""
    return next((m.value for m in info.metadata if isinstance(m, OnResume)), OnResume.FORBIDDEN.value)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _cell(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "spec.md")
