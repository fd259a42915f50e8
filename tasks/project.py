"""What has been read from disk before a stage runs: the spec, the listing of the sources, and the user's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError, PenstockError, SpecError
from penstock.ingest.files.listing import Listing, SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.ingest.spec import DataSpec
from penstock.messages import combine_errors
from penstock.storage import Storage
from penstock.stores import is_local
from penstock.tasks.spec import STATE_FOLDER, PipelineSpec
from penstock.training.callbacks.registry import CALLBACKS
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.checkpoint.start_from import StartWeights, find_start
from penstock.training.frameworks.registry import FRAMEWORKS, RECIPE_OPTIONAL
from penstock.training.registry.registry import REGISTRIES, GivesWeights, ModelRegistry
from penstock.usercode.capture import NO_CODE, UserCode, capture
from penstock.usercode.files import matched_files

if TYPE_CHECKING:  # `penstock status` reads records and does not wait for torch
    from penstock.training.frameworks.framework import Framework
    from penstock.training.job import CallbackCode

__all__ = ["Project"]


@dataclass
class Project:
    """A pipeline file's spec with what it points to, each read at its first use.

    Attributes:
        spec: the checked spec.
        base_dir: folder of the pipeline file; relative paths in the spec start here.
    """

    spec: PipelineSpec
    base_dir: Path

    @property
    def source(self) -> DataSpec:
        """Return the data section for reading: without the label if a transform may make that column."""
        makes_columns = any(entry.transform.makes_columns for entry in self.spec.preprocess)
        return self.spec.data.model_copy(update={"label": None}) if makes_columns else self.spec.data

    @cached_property
    def storage(self) -> Storage:
        """Return the storage of state, cached data and checkpoints."""
        return Storage(self.spec.storage)

    @property
    def files(self) -> list[SourceFile]:
        """Return the source files as they are now. Raises DataError, ServiceError."""
        return self.listing.files

    @cached_property
    def listing(self) -> Listing:
        """Return the source files as they are now, and what lies beside them. Raises DataError, ServiceError."""
        found = format_of(self.spec.data)
        return found.listing(self.spec.data, self.base_dir, self.storage, self.code_files if found.is_kept else ())

    def look_for(self, *more: Callable[[], object], lists: bool = True) -> None:
        """Check that the files of rows and of code exist that the pipeline file names.

        Args:
            more: further checks, whose errors are reported together with these.
            lists: list the source files; otherwise only code is checked.

        Raises:
            SpecError, DataError: all that cannot be found.
        """
        checks: list[Callable[[], object]] = [lambda: self.files] if lists else []
        checks += [
            self._check_code_files,
            lambda: self.recipe,
            lambda: self.transforms,
            lambda: self.callbacks,
            lambda: self.data_config,
            *more,
        ]
        problems: list[PenstockError] = []
        for check in checks:
            try:
                check()
            except (SpecError, DataError) as error:
                problems.append(error)
        if problems:
            raise combine_errors(problems, "the pipeline file names what cannot be found or used")

    @cached_property
    def _source_paths(self) -> set[Path]:
        return {Path(file.uri.removeprefix("file://")).resolve() for file in self.files if is_local(file.uri)}

    @property
    def framework(self) -> Framework:
        """Load the framework of `train.framework`. Raises PreflightError if its package cannot be imported."""
        return FRAMEWORKS.get(self.spec.train.framework)

    @property
    def registry(self) -> ModelRegistry:
        """Load the registry of `tracking.registry`. Raises PreflightError if its package cannot be imported."""
        return REGISTRIES.get(self.spec.tracking.registry)

    def _capture(self, target: str, params: Any = None) -> UserCode:
        return capture(target, self.base_dir, params, lambda file: file in self._source_paths, self.code_files)

    @cached_property
    def code_files(self) -> list[str]:
        """Return the files that `code.files` names, as paths relative to the pipeline file. Each counts for all user code."""
        return matched_files(self.base_dir, self.spec.code.files)

    def _check_code_files(self) -> None:
        for pattern in self.spec.code.files:
            if not matched_files(self.base_dir, [pattern]):
                raise SpecError(
                    f"code.files: {pattern!r} matches no file in {self.base_dir}",
                    next_step="correct the glob (a folder with all below it is `folder/**`), or take it out",
                )

    @cached_property
    def recipe(self) -> UserCode:
        """Return the user's code that the framework trains, if the spec names any. Raises SpecError if it cannot be found."""
        if self.spec.train.recipe is None:
            return NO_CODE
        return self._capture(self.spec.train.recipe, self.spec.train.params)

    @cached_property
    def transforms(self) -> dict[str, UserCode]:
        """Return the functions of `map_batches` transforms, by target. Raises SpecError of all that cannot be found."""
        params: dict[str, list[Any]] = {}
        for entry in self.spec.preprocess:
            if (target := entry.transform.function) is not None:
                params.setdefault(target, []).append(entry.transform.options.model_dump())
        return dict(zip(params, self._captured(list(params.items())), strict=True))

    @cached_property
    def callbacks(self) -> tuple[CallbackCode, ...]:
        """Load the callbacks of `train.callbacks`; a colon marks user code. Raises SpecError of all that are missing."""
        named = self.spec.train.named_callbacks
        if not named:
            return ()
        from penstock.training.job import CallbackCode  # loads torch

        codes = iter(self._captured([(name, options) for name, options in named if ":" in name]))
        return tuple(
            CallbackCode(name, options, next(codes))
            if ":" in name
            else CallbackCode(name, options, origin=CALLBACKS.origin(name) if name in CALLBACKS.names else None)
            for name, options in named
        )

    def _captured(self, named: Sequence[tuple[str, Any]]) -> list[UserCode]:
        """Return the code of each (target, params). Raises SpecError of all that cannot be found."""
        codes: list[UserCode] = []
        problems: list[SpecError] = []
        for target, params in named:
            try:
                codes.append(self._capture(target, params))
            except SpecError as error:
                problems.append(error)
        if problems:
            raise combine_errors(problems, f"{len(problems)} pieces of the code that the pipeline file names cannot be found")
        return codes

    @cached_property
    def data_config(self) -> UserCode | None:
        """The code that `train.datasets` names, if any. Raises SpecError if it cannot be found."""
        named = self.spec.train.datasets
        return self._capture(named) if isinstance(named, str) else None

    @cached_property
    def start_from(self) -> StartWeights | None:
        """Find the weights of `train.start_from`. Raises SpecError if missing, ServiceError if the registry does not answer."""
        name = self.spec.train.start_from
        if name is None:
            return None
        if name.startswith("models:/"):
            return self._registered_start(name)
        return find_start(name, self.base_dir, self.storage, **self._of_start)

    def check_start(self) -> None:
        """Raise SpecError if `train.start_from` is a file or a run that does not exist; a store or a registry is not asked."""
        name = self.spec.train.start_from
        if name is not None and not name.startswith("models:/") and (is_local(self.spec.storage) or "run:" not in name):
            find_start(name, self.base_dir, self.storage, **self._of_start)

    def _registered_start(self, model: str) -> StartWeights:
        registry = self.registry
        if not isinstance(registry, GivesWeights):
            raise SpecError(
                f"train.start_from: {model!r}: registry {self.spec.tracking.registry!r} cannot give weights",
                next_step="name a file of weights, or run:<run>",
            )
        return registry.weights(registry.default_uri(self.base_dir / STATE_FOLDER), model, **self._of_start)

    @property
    def _of_start(self) -> dict[str, Any]:
        """How weights are looked up: those of trees lie in another file, those of a function in a folder."""
        train = self.spec.train
        file = self.framework.model_files[0] if train.framework in RECIPE_OPTIONAL else MODEL
        return {"whole": train.loop is not None, "file": file, "framework": train.framework}

    @property
    def codes(self) -> tuple[UserCode, ...]:
        """All the user's code."""
        theirs = (self.data_config, *(each.code for each in self.callbacks))
        return (self.recipe, *self.transforms.values(), *(code for code in theirs if code is not None))
