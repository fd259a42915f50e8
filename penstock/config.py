"""What is a section of the pipeline file, and which of its fields may change when a run continues?

Every component owns a `Section` beside its code. Each field is tagged `FREE`, `WARN` or `FORBIDDEN`: what a change of it
means to a run that already has a checkpoint. An untagged field is forbidden, so forgetting a tag is safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from penstock.errors import SpecError

__all__ = ["OnResume", "PluginSection", "Section", "added_sections", "leaves", "resume_rules"]


class OnResume(Enum):
    """What a changed field means to a run that has a checkpoint. Use inside `Annotated[...]`."""

    FREE = "free"
    WARN = "warn"
    FORBIDDEN = "forbidden"


class Section(BaseModel):
    """A frozen part of the pipeline file; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def in_file(cls, key: str | None = None) -> dict[str, FieldInfo]:
        """Return the fields by their keys in the file. Overridden where a registry holds them; `key` then selects it."""
        return {info.alias or name: info for name, info in cls.model_fields.items()}


class PluginSection(Section):
    """A section of the pipeline file that a plug-in adds: what is asked of it when the file is checked."""

    def problems(self, spec: Any) -> list[tuple[str, str]]:
        """Return (path, message) for every rule between the section and the rest of `spec` that is broken."""
        return []

    def unmeasured(self, measured: Sequence[str]) -> SpecError | None:
        """Return the error if the section names a metric that is none of `measured`; `val/iou_*` stands for many names."""
        return None


def added_sections(spec: Section) -> Iterator[PluginSection]:
    """Yield the sections of plug-ins that a file has."""
    for name in type(spec).model_fields:
        if isinstance(section := getattr(spec, name), PluginSection):
            yield section


def resume_rules(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, OnResume]]:
    """Yield (dotted path, rule) for every leaf field of a section and of the sections inside it."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        rule = next((m for m in info.metadata if isinstance(m, OnResume)), None)
        inner = _section_in(info.annotation)
        if rule is None and inner is not None:
            yield from resume_rules(inner, f"{path}.")
        else:
            yield path, rule or OnResume.FORBIDDEN


def _section_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every entry of nested JSON that is not None; a list that nests nothing is one value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping | list | tuple) for inner in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{prefix}.{index}")
    elif value is not None:
        yield prefix, value
