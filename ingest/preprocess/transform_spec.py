"""What may a pipeline file write under `preprocess`? The name of a transform, and its options.

A transform is written as one key with its options: `- standard_scaler: {columns: [age, fare]}`. They run in the order written.
A package that adds one is imported when a file uses its name, or when all are listed: in the JSON schema, the reference.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, GetJsonSchemaHandler, SerializationInfo, create_model, model_serializer, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.config import Section
from penstock.digest import digest_of
from penstock.errors import DataError, PenstockError, SpecError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.transforms.registry import TRANSFORMS
from penstock.ingest.preprocess.transforms.transform import Transform
from penstock.messages import describe_error

__all__ = ["FittedPreprocess", "FittedTransform", "TransformSpec"]


class TransformSpec(Section):
    """One transform; exactly one of the fields is set. One without options is written by its name alone: `- label_encoder`."""

    kind: str
    """Name of the transform."""
    options: Any
    """An instance of its `Options`."""

    @model_validator(mode="before")
    @classmethod
    def _of_one_kind(cls, value: Any) -> Any:
        """Read `{kind: options}`, a bare kind (`- label_encoder`), or a kind without options (`label_encoder:`)."""
        if isinstance(value, TransformSpec):
            return value
        given = {value: None} if isinstance(value, str) else value
        if not isinstance(given, dict) or len(given) != 1:
            held = " and ".join(map(str, given)) if isinstance(given, dict) and given else "none"
            raise ValueError(f"a transform is exactly one of {', '.join(TRANSFORMS.names)}; this one has {held}")
        kind, options = next(iter(given.items()))
        try:
            model = _model_of(str(kind))
        except SpecError as error:
            raise ValueError(error.message) from error
        checked = model.model_validate({kind: {} if options is None else options})
        return {"kind": kind, "options": checked.options}  # type: ignore[attr-defined]

    @model_serializer(mode="plain")
    def _as_in_file(self, info: SerializationInfo) -> dict[str, Any]:
        """Write the one kind alone, for any installed packages."""
        held = _model_of(self.kind).model_construct(**{self.kind: self.options})
        return held.model_dump(
            mode=info.mode,
            by_alias=True,
            exclude_none=info.exclude_none,
            exclude_defaults=info.exclude_defaults,
            exclude_unset=info.exclude_unset,
        )

    @classmethod
    def in_file(cls, key: str | None = None) -> dict[str, FieldInfo]:
        """Return one field for each transform; of `key` alone if it is a transform."""
        names = (key,) if key in TRANSFORMS.names else TRANSFORMS.usable
        return {info.alias or name: info for name, info in _model_of_all(names).model_fields.items()}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return one property for each usable transform, and the short forms."""
        schema = handler.resolve_ref_schema(handler(core))
        whole = handler.resolve_ref_schema(handler(_model_of_all(TRANSFORMS.usable).__pydantic_core_schema__))
        schema.clear()
        schema["anyOf"] = [dict(whole), {"type": "string", "enum": list(TRANSFORMS.usable)}]
        return schema

    def __reduce__(self) -> tuple[Any, ...]:
        # With the package's version: a Ray worker with another version, or without it, raises an error that names it.
        return _revived, (self.model_dump(), self.origin)

    @functools.cached_property
    def transform(self) -> Transform[Any]:
        """The transform itself."""
        return TRANSFORMS.get(self.kind)(self.kind, self.options)

    @property
    def origin(self) -> str | None:
        """`package==version` that adds the transform; None for those of penstock."""
        return TRANSFORMS.origin(self.kind)

    @contextlib.contextmanager
    def naming_it(self, number: int, where: Callable[[], str]) -> Iterator[None]:
        """Name the entry in errors, and convert one of another package's transform to a DataError that names package and rows.

        Args:
            number: of the entry in `preprocess`, from 0.
            where: formats the rows or column that it was given.

        Raises:
            DataError: the converted one.
        """
        try:
            yield
        except PenstockError as error:
            error.message = error.message.replace(f"preprocess: {self.kind}", f"preprocess[{number}].{self.kind}")
            raise
        except Exception as error:  # another package's code: any error is reported with its place
            if self.origin is None:
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"preprocess[{number}].{self.kind} of package {self.origin} raised {describe_error(error)} "
                f"({frame.filename}, line {frame.lineno})",
                problems=[f"it was given {where()}"],
                next_step=f"correct the options of preprocess.{self.kind}, or report it to the makers of {self.origin}",
            ) from error


def _revived(written: dict[str, Any], origin: str | None) -> TransformSpec:
    (kind,) = written
    TRANSFORMS.require(kind, origin)
    return TransformSpec.model_validate(written)


@functools.cache
def _model_of(kind: str) -> type[BaseModel]:
    """Return the model of an entry of one kind. Raises SpecError if there is no such transform."""
    options: Any = TRANSFORMS.get(kind).Options
    return create_model(kind, __base__=Section, options=(Annotated[options, Field(alias=kind)], ...))


@functools.cache
def _model_of_all(kinds: tuple[str, ...]) -> type[BaseModel]:
    """Return the model of an entry with one field for each kind."""
    fields: dict[str, Any] = {}
    for kind in kinds:
        transform = TRANSFORMS.get(kind)
        # The name of a field must not be that of a method of pydantic's; its alias may be anything.
        described = Field(default=None, alias=kind, description=transform.description())
        fields[f"{kind}_"] = (transform.Options | None, described)
    return create_model("TransformSpec", __base__=Section, __doc__=TransformSpec.__doc__, **fields)


class FittedTransform(Section):
    """A transform with its state, in the order of its columns."""

    step: TransformSpec
    columns: tuple[ColumnState, ...] = ()
    """Empty if the transform learns nothing."""


class FittedPreprocess(Section):
    """All transforms of a pipeline, fitted on its train split."""

    version: Literal[1] = 1
    steps: tuple[FittedTransform, ...]
    classes: tuple[str, ...] | None = None
    """Names of the label's classes in the order of their indices, if a label encoder learnt them."""
    num_classes: int | None = None

    @functools.cached_property
    def digest(self) -> str:
        """Digest of transforms and state: 32 hex characters."""
        return digest_of(self.model_dump(mode="json"))
