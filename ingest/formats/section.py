"""What may a pipeline file say under `data`? The fields of DataSpec, and a section of options for each format that has some.

The class of the section depends on the formats that the file names: `data_spec(("text",))` has a field `text`. So a file is
read without importing packages that it does not use, and an option of no format is an unknown key like any other.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, SerializeAsAny, create_model, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.errors import PreflightError, SpecError
from penstock.ingest.formats.registry import FORMATS, format_named
from penstock.ingest.spec import DataSpec

__all__ = ["DataSection", "data_spec", "described_data_spec", "spec_class_for"]


class _CheckedSpec(DataSpec):
    """What the classes made here have in common."""

    option_sections: ClassVar[tuple[str, ...]] = ()
    """The formats that the class was made for."""

    @field_validator("format")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            format_named(name)
        except SpecError as error:
            own = (each for each in FORMATS.names if FORMATS.origin(each) is None)
            reads = next((each for each in own if f".{name.lower().strip('.')}" in format_named(each).extensions), None)
            raise ValueError(error.message + (f"; `{reads}` reads such files" if reads else "")) from error
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        # By the formats' names: a class that is made while the program runs cannot be found by its own in a Ray worker.
        # The package's version first: a worker that has another one, or none, refuses by name before it imports anything of it.
        return _revived, (self.format, FORMATS.origin(self.format), self.option_sections, pickle.dumps(self.__getstate__()))


def _revived(format: str, origin: str | None, names: tuple[str, ...], state: bytes) -> DataSpec:
    FORMATS.require(format, origin)
    spec_class = data_spec(names)
    spec = spec_class.__new__(spec_class)
    spec.__setstate__(pickle.loads(state))
    return spec


@functools.cache
def data_spec(names: tuple[str, ...]) -> type[DataSpec]:
    """Return the section `data` with a field for each format of `names` that has options.

    Raises:
        SpecError, PreflightError: as `format_named`; or the name of a format with options is that of a field of `data`.
    """
    fields: dict[str, Any] = {}
    for name in names:
        options = format_named(name).Options
        if options is None:
            continue
        if name in DataSpec.model_fields or hasattr(DataSpec, name):
            raise PreflightError(
                f"the format {name!r} of {FORMATS.origin(name)} has options, for which data.{name} is taken",
                next_step="rename the format in its package",
            )
        needed = any(field.is_required() for field in options.model_fields.values())
        fields[name] = (options, Field(default=None if needed else options(), description=f"Options of `format: {name}`."))
    made = create_model("DataSpec", __base__=_CheckedSpec, __module__=__name__, __doc__=DataSpec.__doc__, **fields)
    made.option_sections = names
    return made


def described_data_spec() -> type[DataSpec]:
    """Return the section `data` with every usable format, for the JSON schema and the reference; imports their packages."""
    formats = {}
    for name in FORMATS.names:
        with contextlib.suppress(PreflightError):  # a package that is broken stops only a file that uses it
            data_spec((name,))
            formats[name] = format_named(name)
    described = [f"`{name}` ({', '.join(form.extensions)}): {_first_line(form)}" for name, form in formats.items()]
    field = Field(description=" ".join(["Format of every source file.", *described]))
    names: Any = Literal[tuple(formats)]
    return create_model("DataSpec", __base__=data_spec(tuple(formats)), __doc__=DataSpec.__doc__, format=(names, field))


def _first_line(form: object) -> str:
    return " ".join((inspect.getdoc(type(form)) or "").split("\n\n")[0].split())


def spec_class_for(value: Any) -> type[DataSpec]:
    """Return the class of a file's section `data`: with the options of its format, and those that it names besides."""
    if not isinstance(value, dict):
        return DataSpec
    named = {*value} - {*DataSpec.model_fields}  # `images` is an option of every format
    named |= {value["format"]} if isinstance(value.get("format"), str) else set()
    return data_spec(tuple(name for name in FORMATS.names if name in named))


def _of_its_format(value: Any) -> Any:
    """Validate with the class that has the options of the file's format."""
    if not isinstance(value, dict):
        return value
    spec_class, name = spec_class_for(value), value.get("format")
    if name in spec_class.model_fields and name not in DataSpec.model_fields:
        # Options that are needed are then missing by their own name.
        value = {name: {}, **value}
    return spec_class.model_validate(value)


class _EveryFormat:
    """The JSON schema of the section: with every format there is."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(described_data_spec().__pydantic_core_schema__)


DataSection = Annotated[SerializeAsAny[DataSpec], BeforeValidator(_of_its_format), _EveryFormat()]
"""The type of the field `data` of a pipeline file."""
