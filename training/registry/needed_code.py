"""Which modules of penstock does a registered model need? Those that its imports reach, followed from what loads it.

A version keeps them as one archive of source text, which Python imports from as it is: a hundred small files would be a hundred
requests to an artifact store for each version that is registered or loaded.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.ingest.formats.registry import FORMATS
from penstock.ingest.preprocess.transforms.registry import TRANSFORMS
from penstock.own_code import IMPORT_ROOT, PACKAGE_DIR
from penstock.training.model import ModelSpec
from penstock.training.registry.raw_rows import RawForm

__all__ = ["archive_needed_code", "needed_modules"]


_ENTRY = "penstock.training.registry.serving"


_NO_TIME = (1980, 1, 1, 0, 0, 0)
"""The first that an archive can say: equal code makes equal bytes."""


def archive_needed_code(model: ModelSpec, archive: Path) -> None:
    """Write the modules that loading and asking `model` needs to a zip file, as the package penstock."""
    form = RawForm.model_validate(model.raw)
    named = [FORMATS.place(form.data.format), *(TRANSFORMS.place(entry.step.kind) for entry in form.fitted.steps)]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in needed_modules([_ENTRY, *(place.partition(":")[0] for place in (model.loader, *named))]):
            file = _file_of(name)
            assert file is not None
            member = zipfile.ZipInfo(f"penstock/{file.relative_to(PACKAGE_DIR).as_posix()}", _NO_TIME)
            packed.writestr(member, file.read_bytes(), zipfile.ZIP_DEFLATED)


def needed_modules(roots: Iterable[str]) -> list[str]:
    """Modules of penstock that the imports of `roots` reach, those inside functions too, with the packages they lie in.

    Args:
        roots: dotted names. A module of another package is followed for what it imports of penstock.
    """
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting += _next_to(name)
    return sorted(name for name in seen if name.split(".", 1)[0] == "penstock" and _file_of(name) is not None)


@functools.cache
def _next_to(name: str) -> tuple[str, ...]:
    """What a module imports of penstock and of its own package, and the packages it lies in; read once, as Python does."""
    file = _file_of(name)
    if file is None:
        return ()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    tops = "penstock", name.split(".", 1)[0]
    found = [imported for imported in _imports(ast.parse(file.read_bytes()), package) if imported.split(".", 1)[0] in tops]
    return (*found, *([package] if package else []), *([package.rpartition(".")[0]] if "." in package else []))


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that may be modules; what is imported for type checking alone is left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def _file_of(name: str) -> Path | None:
    """The source of a module; None where the name is no module, or has no source."""
    if name.split(".", 1)[0] == "penstock":
        place = IMPORT_ROOT.joinpath(*name.split("."))
        return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None
