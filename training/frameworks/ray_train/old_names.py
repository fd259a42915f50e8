"""Does a training function use names that nothing has: of older releases of Ray, or of datasets?"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from penstock.errors import SpecError
from penstock.usercode.capture import UserCode

__all__ = ["refuse_absent_datasets", "refuse_old_names"]

_DDP = "torch's DistributedDataParallel takes its place: ray.train.torch.prepare_model(model)"
_TODAY = {
    "horovod": f"Horovod is gone from Ray; {_DDP}",
    "ray.train.horovod": f"Horovod is gone from Ray; {_DDP}",
    "ray.air.session": "today: ray.train.report, ray.train.get_checkpoint, ray.train.get_dataset_shard, ray.train.get_context",
    "ray.air": "today: ray.train, which has Checkpoint and the configs",
    "ray.train.DatasetConfig": "in a pipeline: train.datasets: {validation: whole}",
}
"""Module, or name of one -> what to write instead. The longest that fits counts."""

_DATASET_CONFIG = "not here: train.datasets in the pipeline file says which datasets are cut over the workers"


def refuse_old_names(files: Mapping[str, str]) -> None:
    """Refuse old names in the sources that the function reaches; code under `__main__` is not checked.

    Args:
        files: project path -> source text; only Python files are checked.

    Raises:
        SpecError: all old names, with their lines and today's.
    """
    problems = [
        f"{path}:{line}: {name}: {advice}"
        for path, text in sorted(files.items())
        if path.endswith(".py")
        for line, name, advice in _longest(set(_found(ast.parse(text))))
    ]
    if problems:
        raise SpecError("train.loop uses names of an older Ray", problems=problems, next_step="write today's names")


def refuse_absent_datasets(code: UserCode, there: Collection[str]) -> None:
    """Refuse a function that always asks for a dataset which does not exist. Calls below an `if` or a `try` are not checked.

    Args:
        there: names of the datasets.

    Raises:
        SpecError: all such names, with their lines.
    """
    _, _, function = code.target.partition(":")
    problems = [
        f"{path}:{line}: get_dataset_shard({name!r})"
        for path, text in sorted(code.files.items())
        if path.endswith(".py")
        for each in ast.parse(text).body
        if isinstance(each, ast.FunctionDef) and each.name == function
        for line, name in _asked(each)
        if name not in there
    ]
    if problems:
        raise SpecError(
            f"{code.target} asks for a dataset that does not exist; there are {', '.join(dict.fromkeys(there))}",
            problems=problems,
            next_step="name its files, data.datasets: {NAME: ...}, or a split, train.datasets: {NAME: test}; validation and "
            "test need data.validation and data.test",
        )


def _asked(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each dataset that the statements below ask for on every way through them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.IfExp | ast.Try | ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func).endswith("get_dataset_shard"):
            given = [*child.args, *(keyword.value for keyword in child.keywords)]
            if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
                yield child.lineno, given[0].value
        yield from _asked(child)


def _longest(found: set[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Sort, without the prefixes of a longer name on the same line."""
    return sorted(
        (line, name, advice)
        for line, name, advice in found
        if not any(line == other and longer.startswith(f"{name}.") for other, longer, _ in found)
    )


def _found(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for statement in tree.body:
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            for name in _names(node):
                parts = name.split(".")
                known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
                old = next((each for each in known if each in _TODAY), None)
                if old is not None:
                    yield node.lineno, old, _TODAY[old]  # type: ignore[attr-defined]  # imports and attributes have lines
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer"):
                yield from (
                    (node.lineno, f"{ast.unparse(node.func)}(dataset_config=...)", _DATASET_CONFIG)
                    for keyword in node.keywords
                    if keyword.arg == "dataset_config"
                )


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
