"""Turn a YAML file with overrides into a checked spec, and report every problem at its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from penstock.config import Section, leaves
from penstock.errors import SpecError
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.spec import DataSpec
from penstock.messages import did_you_mean
from penstock.plugins import needed
from penstock.redact import holds_secret
from penstock.stores import is_local, use_stores
from penstock.tasks.spec import NAMED, STATE_FOLDER, PipelineSpec, cross_check

if TYPE_CHECKING:
    from penstock.tasks.project import Project

__all__ = [
    "GIVEN",
    "LoadedSpec",
    "as_override",
    "load_spec",
    "option_values",
    "refuse_secrets",
    "schema_json",
    "spec_path",
    "with_values",
]

Path_ = tuple[str | int, ...]

Problem = tuple[str, str]
"""(dotted path, message)"""


@dataclass(eq=False)
class LoadedSpec:
    """A checked pipeline spec and where each value came from."""

    spec: PipelineSpec
    """The spec, with `storage` made absolute."""
    file: Path
    """The pipeline file, absolute."""
    overrides: tuple[str, ...]
    """The `--set` texts, in order."""
    origins: dict[str, str]
    """Dotted path of every value that is not null -> `file:line`, `--set` or `default`."""
    text: str
    """Of the file when it was read; another program may give a spec of the same name later."""

    @property
    def base_dir(self) -> Path:
        """The folder of the pipeline file: relative paths in it start here."""
        return _base_of(self.file)

    @cached_property
    def project(self) -> Project:
        """The spec with its files, code and storage; each is loaded once, on first use."""
        from penstock.tasks.project import Project  # it loads the registries of frameworks and formats

        return Project(self.spec, self.base_dir)

    @property
    def state_dir(self) -> Path:
        """Where embedded servers keep their files, whatever the storage is."""
        return self.base_dir / STATE_FOLDER


GIVEN = f"{STATE_FOLDER}/given"
"""The folder beside a project's pipeline file where specs and code are that a program gave."""


def _base_of(file: Path) -> Path:
    return file.parents[2] if file.parent.as_posix().endswith(f"/{GIVEN}") else file.parent


def spec_path(file: str | Path) -> Path:
    """Return the absolute path of a pipeline file, given by its path or its folder's. Raises SpecError if there is none."""
    path = Path(file).expanduser()
    if path.is_dir():
        path = path / "pipeline.yaml"
    if not path.is_file():
        there = sorted(each.name for each in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise SpecError(
            f"no pipeline file at {path}"
            + (f"; {path.parent.resolve()} has {', '.join(there[:_NAMED_FILES])}" if there else ""),
            next_step="name an existing one, or make a project: penstock init DIR",
        )
    return path.resolve()


def load_spec(file: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, is_draft: bool = False) -> LoadedSpec:
    """Read, override, validate and cross-check a pipeline file.

    Args:
        file: path of the YAML file, or what it would hold, where code may be functions and classes: these are written to
            `.penstock/given` of the working directory.
        overrides: texts `a.b=value`; the value is read as YAML; numbers index lists.
        is_draft: what a program gives is checked, and its pipeline file left as it is.

    Raises:
        SpecError: with every problem found, each as `file:line: path: message`.
    """
    try:
        if isinstance(file, Mapping):
            path, text = needed("penstock.flows.given.code:write_spec", "a spec given as a dict")(file, is_draft)
        else:
            path = spec_path(file)
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",
            next_step=f"save it as UTF-8, then: penstock check {path}",
        ) from error
    data, lines, of_text = _parse(path, text)
    problems = [*of_text]
    name = "spec" if isinstance(file, Mapping) else path.name  # a program has not written the lines of its file
    origins = {_dotted(p): name if isinstance(file, Mapping) else f"{name}:{line}" for p, line in lines.items()}
    for override in overrides:
        problems += _apply(data, override, origins)
    spec, found = _validated(data)
    problems += found
    if problems or spec is None:
        shown = [
            f"{where}: {message}" if where in (p, f"--set {p}") else f"{where}: {p}: {message}"
            for p, message in problems
            for where in [_where(name, p, origins)]
        ]
        raise SpecError(
            f"{name} has {len(shown)} problem{'s' if len(shown) > 1 else ''}",
            problems=shown,
            next_step="correct the spec that the program gives"
            if isinstance(file, Mapping)
            else f"{'correct the --set options, or ' if overrides else ''}edit {path.name}, then: penstock check {file}",
        )
    spec = spec.model_copy(update={"storage": _absolute(spec.storage, _base_of(path))})
    use_stores(spec.stores)  # from here on locations use these settings
    written = {p: _origin(p, origins) for p, _ in leaves(spec.model_dump(mode="json", by_alias=True))}
    return LoadedSpec(spec, path, tuple(overrides), written, text)


def _validated(data: dict[str, Any]) -> tuple[PipelineSpec | None, list[Problem]]:
    """Validate; return the spec, if its form is right, and the problems."""
    try:
        spec = PipelineSpec.model_validate(data)
    except ValidationError as error:
        described = [_describe(item, data) for item in error.errors(include_url=False)]
        deeper = [at for at, _ in described]  # of a union each form has a problem; an entry's says more than "a string"
        return None, [
            (at, text)
            for at, text in described
            if text != "input should be a valid string" or not any(each.startswith(f"{at}.") for each in deeper)
        ]
    read = spec.model_dump(mode="json", by_alias=True)
    return spec, [*_booleans(data, read, ()), *cross_check(spec), *_secrets(read)]


_BOOLEAN = "YAML reads yes, no, on, off, true and false as booleans"


def _booleans(given: Any, read: Any, at: Path_) -> Iterator[Problem]:
    """Find booleans that pydantic has read as the numbers 0 and 1."""
    if isinstance(given, bool) and type(read) in (int, float):
        yield _dotted(at), f"{given!r}: this is a number, and {_BOOLEAN}; write a number"
    elif isinstance(given, list) and isinstance(read, list):
        for index, (each, inner) in enumerate(zip(given, read, strict=False)):
            yield from _booleans(each, inner, (*at, index))
    elif isinstance(given, dict) and isinstance(read, dict):
        for key, each in given.items():
            yield from _booleans(each, read.get(key), (*at, str(key)))


def _absolute(storage: str, base_dir: Path) -> str:
    return str((base_dir / Path(storage.removeprefix("file://")).expanduser()).resolve()) if is_local(storage) else storage


def as_override(key: str, value: Any) -> str:
    """Return the `--set` text that gives `key` this value."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return f"{key}={text.removesuffix('...' + chr(10)).strip()}"


def option_values(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `--option` texts `a.b=value`. Raises SpecError for another form, and for a secret."""
    values: dict[str, Any] = {}
    problems = [message for text in texts for _, message in _apply(values, text, {})]
    if problems:
        advice = "write --option NAME=VALUE, a sign of YAML in quotes: --option 'quote=\"|\"'"
        raise SpecError(f"--option: {'; '.join(problems)}", next_step=advice)
    refuse_secrets("--option", values)
    return values


def refuse_secrets(option: str, value: Any) -> None:
    """Raise SpecError if the value of a command's option holds a secret: Prefect and the output's records keep it."""
    for path, message in _secrets(value):
        name = f"{option} {path}".strip()
        raise SpecError(f"{name}: {message.replace('of this file', 'of a command')}", next_step=f"correct {option}")


def with_values(loaded: LoadedSpec, values: Mapping[str, Any]) -> str:
    """Return the text of `loaded`'s file with overrides and `values` applied, without its section `tune`."""
    data = yaml.safe_load(loaded.file.read_text(encoding="utf-8"))
    for override in (*loaded.overrides, *(as_override(key, value) for key, value in values.items())):
        _apply(data, override, {})
    data.pop("tune", None)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


_NAMED_FILES = 5
"""Pipeline files listed in an error."""

_NAMED_BY_COLUMN = re.compile(r"^(data\.types|preprocess\.\d+\.(cast|rename))\.")
"""Keys that are names of columns: they say nothing about their values."""


def _secrets(value: Any, path: str = "") -> Iterator[Problem]:
    """Find values that look like secrets: every value of the file is recorded and shown."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _secrets(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str) and holds_secret("" if _NAMED_BY_COLUMN.search(path) else path, value):
        yield path, "this looks like a secret, and every value of this file is recorded; read it from the environment instead"


def schema_json() -> str:
    """Return the JSON Schema of a pipeline file, for editors."""
    schema = PipelineSpec.model_json_schema(by_alias=True)
    for path, names in NAMED.items():
        _property_of(schema, path)["enum"] = list(names.names)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "penstock pipeline"
    return json.dumps(schema, indent=1) + "\n"


def _property_of(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the JSON Schema of the field at a dotted path."""
    found = schema
    for part in path.split("."):
        section = found.get("$ref") or next((each["$ref"] for each in found.get("allOf", ())), None)
        found = (schema["$defs"][section.rsplit("/", 1)[1]] if section else found)["properties"][part]
    return found


def _parse(path: Path, text: str) -> tuple[dict[str, Any], dict[Path_, int], list[Problem]]:
    try:
        node, data = _read_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}:{mark.column + 1}" if mark else path.name
        raise SpecError(
            f"{where}: not valid YAML: {getattr(error, 'problem', error)}",
            next_step=f"correct {path.name} near that line, then: penstock check {path}",
        ) from error
    if not isinstance(data, dict) or node is None:
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise SpecError(
            f"{path.name}: a pipeline file is a mapping with name, data and train; this is {kind}",
            next_step=f"edit {path.name}, or see what one looks like: penstock init DIR",
        )
    lines: dict[Path_, int] = {}
    problems: list[Problem] = []
    for location, line, duplicate in _walk(node, ()):
        if duplicate:
            problems.append((_dotted(location), f"the key is there twice (again in line {line}); YAML would keep the last"))
        lines.setdefault(location, line)
    return data, lines, problems


def _read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the tree and the value of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML, or its aliases hold themselves or multiply beyond `_MOST_VALUES`.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    left, values = [node], 0
    while left:
        each = left.pop()
        values += 1
        if values > _MOST_VALUES:
            problem = f"it has more than {_MOST_VALUES:,} values: an alias (*name) holds itself, or aliases multiply"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=None if node is None else node.start_mark)
        if isinstance(each, yaml.MappingNode):
            left += [value for _, value in each.value]
        elif isinstance(each, yaml.SequenceNode):
            left += each.value
    return node, yaml.safe_load(text)


_MOST_VALUES = 100_000
"""More than any pipeline file has."""


def _walk(node: yaml.Node, at: Path_) -> Iterator[tuple[Path_, int, bool]]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            location = (*at, str(key.value))
            yield location, key.start_mark.line + 1, key.value in seen
            seen.add(key.value)
            yield from _walk(value, location)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*at, index), value.start_mark.line + 1, False
            yield from _walk(value, (*at, index))


def _apply(data: dict[str, Any], override: str, origins: dict[str, str]) -> list[Problem]:
    key, equals, raw = override.partition("=")
    if not equals or not key.strip():
        return [("--set", f"{override!r} is not of the form a.b=value")]
    try:
        value = _read_yaml(raw)[1]
    except yaml.YAMLError as error:
        return [("--set", f"{override!r}: the value is not valid YAML: {getattr(error, 'problem', error)}")]
    parts = key.strip().split(".")
    target: Any = data
    for depth, part in enumerate(parts):
        at: int | str = part
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                return [("--set", f"{override!r}: {'.'.join(parts[: depth + 1])} is not an index of a list of {len(target)}")]
            at = int(part)
        if depth == len(parts) - 1:
            target[at] = value
        elif isinstance(target, dict) and not isinstance(target.get(part), dict | list):
            target[at] = {}
        target = target[at]
    for stale in [p for p in origins if p == key or p.startswith(f"{key}.")]:
        del origins[stale]
    origins[key.strip()] = f"--set {key.strip()}"
    return []


def _describe(item: Any, data: dict[str, Any]) -> Problem:
    location = tuple(part for part in item["loc"] if isinstance(part, int) or _is_key(part))
    path = _dotted(location)
    value = item.get("input")
    if item["type"] == "extra_forbidden":
        known = _fields(location[:-1], data)
        elsewhere = _with_section(location, data)
        hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(str(location[-1]), known)
        if known and not hint:
            hint = f"; known here: {', '.join(sorted(known))}"
        return path, f"unknown key{hint}"
    if item["type"] == "missing":
        return path, "missing; this key is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch":
        if location[-1] == "[key]":  # the name of an entry is wrong
            location = location[:-2]
            path = _dotted(location)
        field = _fields(location[:-1], data).get(str(location[-1]))
        rule = (field.description or "").partition(". ")[0].rstrip(".") if field is not None else ""
        plain = re.sub(r"[^a-z0-9_-]+", "-", str(value).lower()).strip("-") if str(value).isascii() else ""
        meant = f"; did you mean {plain!r}?" if plain and re.match(item["ctx"]["pattern"], plain) else ""
        message = f"{message}{rule and f' ({rule})'}{meant}"
    shown = "" if isinstance(value, dict | list) else f"{value!r}: "
    hint = f" ({_BOOLEAN})" if isinstance(value, bool) else ""
    return path, f"{shown}{message[:1].lower()}{message[1:]}{hint}"


def _is_key(part: str) -> bool:
    # For a union, pydantic adds the variant to the location: `data.validation.SplitRule.fraction`.
    return part not in {"SplitRule", "str", "none"} and not part.startswith(
        ("function-", "literal[", "constrained-", "list[", "dict[")
    )


def _with_section(location: Path_, data: dict[str, Any]) -> list[str]:
    """Return `[train.epochs]` for the key `epochs` without its section, if only one section has it."""
    if len(location) > 1:
        return []
    sections = (name for name in _fields((), data) if location[0] in _fields((name,), data))
    found = [f"{name}.{location[0]}" for name in sections]
    return found if len(found) == 1 else []


def _fields(location: Path_, data: dict[str, Any]) -> dict[str, FieldInfo]:
    """Return the keys of a section of the file."""
    model: type[Section] | None = PipelineSpec
    is_name = False  # the part is an entry of a mapping, such as a bucket of `stores`
    for part in location:
        if isinstance(part, int) or model is None or is_name:
            is_name = False
            continue
        field = model.in_file(part).get(part)
        is_name = field is not None and get_origin(field.annotation) is dict
        model = _section(field.annotation) if field is not None else None
        if model is DataSpec:
            model = spec_class_for(data.get("data"))
    return {} if model is None else dict(model.in_file())


def _section(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section(inner)) is not None), None)


def _dotted(path: Path_) -> str:
    return ".".join(str(part) for part in path)


def _where(name: str, path: str, origins: dict[str, str]) -> str:
    if path == "--set":
        return path
    below = next((origin for leaf, origin in origins.items() if leaf.startswith(f"{path}.")), "default")
    found = origins.get(path, below) if below.startswith("--set") else _nearest(path, origins)
    return name if found == "default" else found


def _nearest(path: str, origins: dict[str, str]) -> str:
    """Return the origin of a path, or of the closest mapping above it, where a missing key would be added."""
    if path in origins:
        return origins[path]
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        parent = ".".join(parts[:depth])
        if parent in origins:
            return origins[parent]
    return "default"


def _origin(leaf: str, origins: dict[str, str]) -> str:
    """Return the origin of a value: its line, the `--set` of a mapping around it, or the default."""
    above = _nearest(leaf, origins)
    return origins.get(leaf, above if above.startswith("--set") else "default")
