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
    "ray.train.save_checkpoint": "today: ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))",
    "ray.train.load_checkpoint": "today: ray.train.get_checkpoint()",
    **{
        f"ray.train.{name}": f"today: ray.train.get_context().get_{name}()"
        for name in ("world_size", "world_rank", "local_rank")
    },
    "ray.train.Trainer": "in a pipeline: train.loop, train.workers, train.gpus, train.backend: {name: gloo}",
    "ray.train.CheckpointStrategy": "in a pipeline: train.checkpoint: {keep: 3, best: {metric: accuracy, mode: max}}",
    "ray.train.TrainingCallback": "gone from Ray; what is reported is charted by the tracker",
    "ray.train.callbacks": "gone from Ray; what is reported is charted by the tracker",
    "ray.rllib": "RLlib learns from an environment, not from rows: run it outside of a pipeline",
}
"""Module, or name of one -> what to write instead. The longest that fits counts."""

_REPORT = ("metrics", "checkpoint", "validation", "delete_local_checkpoint_after_upload")
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
    """Refuse a function that always asks for a dataset which does not exist. Only calls on every way are checked.

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


_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)
_MAYBE = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Parts of these may not be run."""


def _asked(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each dataset that a statement at the function's top level asks for, up to a way out."""
    for statement in function.body:
        if isinstance(statement, _DEFINES):
            continue
        parts = [*ast.walk(statement)]
        for call in parts if isinstance(statement, _SIMPLE) and not any(isinstance(each, _MAYBE) for each in parts) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("get_dataset_shard"):
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
                    yield call.lineno, given[0].value
        if any(isinstance(each, ast.Return | ast.Raise) for each in parts):
            return


def _longest(found: set[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Sort, without the prefixes of a longer name on the same line."""
    return sorted(
        (line, name, advice)
        for line, name, advice in found
        if not any(line == other and longer.startswith(f"{name}.") for other, longer, _ in found)
    )


def _found(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    imported = _imported(tree)
    for statement in tree.body:
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            continue
        for node in ast.walk(statement):
            for name in _names(node, imported):
                parts = name.split(".")
                known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
                old = next((each for each in known if each in _TODAY), None)
                if old is not None:
                    yield node.lineno, old, _TODAY[old]  # type: ignore[attr-defined]  # imports and attributes have lines
            if isinstance(node, ast.Call) and _whole(ast.unparse(node.func), imported) == "ray.train.report":
                for word in node.keywords:
                    if word.arg is not None and not word.arg.startswith(_REPORT):
                        yield node.lineno, f"ray.train.report({word.arg}=...)", 'today: a dict, ray.train.report({"loss": 0.5})'
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer"):
                yield from (
                    (node.lineno, f"{ast.unparse(node.func)}(dataset_config=...)", _DATASET_CONFIG)
                    for keyword in node.keywords
                    if keyword.arg == "dataset_config"
                )


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what the names mean that the file imports: `train` is `ray.train` after `from ray import train`."""
    meant: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            meant |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return meant


def _whole(name: str, imported: Mapping[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{imported.get(first, first)}{dot}{rest}"


def _names(node: ast.AST, imported: Mapping[str, str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [_whole(ast.unparse(node), imported)] if isinstance(node, ast.Attribute) else []
