"""Check storage, disk, memory, CPUs and the recipe before a run spends anything."""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyarrow as pa

from penstock.errors import PenstockError, PreflightError, SpecError
from penstock.flows.preflight.cpus import need_of_worker, tasks_refused, workers_refused
from penstock.flows.preflight.nodes import installed_versions, refuse_unfit_nodes
from penstock.flows.servers.probes import StorageFailure, ray_address, storage_failure
from penstock.flows.spec_file import LoadedSpec
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of, reader_of
from penstock.ingest.prepare import ClusterNode, nodes_refused
from penstock.ingest.preprocess.named_columns import check_named_columns
from penstock.ingest.read.inspection import glance
from penstock.ingest.read.unify import columns_in
from penstock.machine.cache_dir import cache_folder, configured_budget
from penstock.messages import counted, describe_error
from penstock.storage import NO_ROOM, Storage, existing_folder
from penstock.stores import is_local
from penstock.tasks.project import Project
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.training.on_ray.resources import missing_for_workers

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = [
    "Preflight",
    "check_cluster",
    "check_machine",
    "check_named",
    "check_recipe",
    "check_resources",
    "check_storage",
    "file_with_rows",
    "machine_cpus",
]

PREPARED_TO_SOURCE = 3.0
"""Prepared rows may take this many times the bytes of the sources: text and compressed files grow."""

FREE_AFTER_BYTES = 256 << 20
"""Bytes that must stay free on the disk of the storage."""


def check_storage(storage: Storage, *, writes: bool = True) -> None:
    """Write, list, read and delete a small file; check the node's cache, where rows of a remote storage go first.

    Args:
        writes: without it nothing is written, and only the permissions of a local storage are checked.

    Raises:
        PreflightError: naming the storage and the store's error, or the folder of the cache.
        SpecError: PENSTOCK_CACHE_BYTES is not a size.
    """
    configured_budget()
    storage.refuse_file()
    if not writes:
        folder = existing_folder(Path(storage.root))
        if storage.is_local and not os.access(folder, os.W_OK | os.X_OK):
            error = PermissionError(errno.EACCES, f"{folder} may not be written")
            raise _storage_refusal(storage, StorageFailure("written", error))
        return
    if not storage.is_local:
        check_cache_folder()
    failure = storage_failure(storage)
    if failure is not None:
        raise _storage_refusal(storage, failure) from failure.error


def check_cache_folder() -> None:
    """Raise PreflightError if the folder where this machine caches shards cannot be written, SpecError of a wrong size."""
    configured_budget()
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise PreflightError(
            f"the cache of shards {folder} cannot be written: {error.strerror or error}",
            next_step="point PENSTOCK_CACHE_DIR to a folder on a local disk",
        ) from error


def _storage_refusal(storage: Storage, failure: StorageFailure) -> PreflightError:
    verb, error = failure
    if getattr(error, "errno", None) in NO_ROOM:
        return PreflightError(
            f"storage {storage.root} cannot be {verb}: its disk is full",
            next_step=f"free some space ({FREE_AFTER_BYTES / 1e6:,.0f} MB must stay free), then run the same command",
        )
    reason = error.message if isinstance(error, PenstockError) else describe_error(error)
    correct = "make the folder writable, or set `storage` to another"
    if not storage.is_local:
        correct = "correct `storage` (or the credentials and AWS_ENDPOINT_URL)"
    return PreflightError(
        f"storage {storage.root} cannot be {verb}: {getattr(error, 'strerror', None) or reason}",
        next_step=f"{correct}, and run the same command",
    )


class Preflight:
    """The checks of one loaded file. Each succeeds once, for the command and the flow; a failed check is repeated."""

    def __init__(self, loaded: LoadedSpec) -> None:
        self.loaded, self.project = loaded, loaded.project

    @cached_property
    def storage(self) -> None:
        """Run `check_storage`; a store is tried out by the first run of the pipeline alone, in `open_attempt`."""
        if self.project.storage.is_local:
            check_storage(self.project.storage)
        else:
            check_cache_folder()

    @cached_property
    def resources(self) -> list[str]:
        """Run `check_resources`; its warnings."""
        return check_resources(self.project)

    @cached_property
    def machine(self) -> None:
        """Run `check_machine`."""
        check_machine(self.loaded.spec)

    def ahead(self, until: str | None = None, *, writes: bool = True) -> None:
        """Check files, their columns, code and machine before a server starts, as far as that is quick.

        Listing a remote store may take long, and is left to the flow.

        Args:
            until: the last stage of the run.
            writes: as in `check_storage`, of a local storage.

        Raises:
            PenstockError: the first part that fails, with all its problems.
        """
        project, spec = self.project, self.loaded.spec
        places = [place for split in spec.data.locations if isinstance(place := spec.data.place(split), str)]
        # Rows that a cluster will copy are listed once the flow has joined it.
        lists = all(map(is_local, places)) and not (ray_address() is not None and format_of(spec.data).is_kept)
        check_named(project, lists=lists)
        project.check_start()
        if not is_local(spec.storage):
            return
        begins = not _has_begun(project)
        if begins and ray_address() is None and until not in BEFORE_TRAINING:
            _ = self.machine
        if writes:
            _ = self.storage
        else:
            check_storage(project.storage, writes=False)
        if begins and lists:
            _ = self.resources


def _has_begun(project: Project) -> bool:
    """Return whether part of the work may be done already."""
    try:
        return Ledger(project.storage).current_run(project.spec.name) is not None
    except PenstockError:  # the flow reports it
        return True


def check_named(project: Project, *, lists: bool = True) -> None:
    """Check that all files and columns that the pipeline file names exist.

    Args:
        lists: list the source files; without it only code is checked.

    Raises:
        SpecError, DataError: with everything that is missing, or that a transform cannot take.
    """
    project.look_for(*([lambda: _check_columns(project)] if lists else []), lists=lists)


def _check_columns(project: Project) -> None:
    """Compare the columns that the pipeline file names with those of one source file, if its beginning shows them.

    Raises:
        SpecError: with every column that is missing, or holds text that a transform does not take.
    """
    # All columns of the file, not only those to read, so that a wrong name gets a good message.
    data, reader = project.source, reader_of(project.spec.data.model_copy(update={"columns": None}))
    files = [file for file in project.files if file.location == "train"]
    if len(files) > 1 and (reader.missing_is_null or data.missing_columns == "null"):
        return  # another file may have a column that this one lacks
    file = file_with_rows(files)
    facts = glance(reader, file)
    if facts is not None and facts.rows:
        columns = columns_in(data, file, facts)
        # One word makes a column of numbers a column of text; reading all files finds its place.
        strays = {name for name, seen in facts.mostly_numbers.items() if seen is not None and name not in data.types}
        sure = {name: pa.null() if name in strays else kind for name, kind in columns.items()}
        slices = [name for each in project.spec.evaluate.slices for name in ([each] if isinstance(each, str) else each)]
        check_named_columns(data, project.spec.preprocess, sure, project.spec.data.label, slices)


def file_with_rows(files: Sequence[SourceFile]) -> SourceFile:
    """Return the first file of half the mean size or more: Spark and Dask write parts without rows."""
    half = sum(file.size_bytes for file in files) / len(files) / 2
    return next(file for file in files if file.size_bytes >= half)


def check_resources(project: Project) -> list[str]:
    """Compare disk and memory with the size of the sources; return warnings, also about files that are not read.

    Raises:
        PreflightError: the prepared rows cannot fit.
    """
    source = sum(file.size_bytes for file in project.files)
    spec, left_out = project.spec, project.listing.describe_left_out()
    warnings = [left_out] if left_out else []
    if any(entry.kind == "flat_map" for entry in spec.preprocess):
        warnings.append("the registered model refuses a row of which flat_map makes several")
    if project.storage.is_local and spec.materialize.cache == "disk":
        folder = existing_folder(Path(project.storage.root))
        free = shutil.disk_usage(folder).free
        # Units that an earlier attempt committed are not written again.
        there = sum(shard.stat().st_size for shard in folder.glob("units/*/*.arrow"))
        if free + min(there, source) < source + FREE_AFTER_BYTES:
            raise PreflightError(
                f"{folder} has {free / 1e6:,.0f} MB free; prepared rows take about as much as the sources "
                f"({source / 1e6:,.0f} MB), and {FREE_AFTER_BYTES / 1e6:,.0f} MB must stay free",
                next_step="free some space, or point `storage` to a larger disk or to s3://",
            )
    if spec.materialize.cache == "memory" and ray_address() is None:  # of a cluster its nodes count: `check_cluster`
        _refuse_little_memory(source, psutil.virtual_memory().available, "is free here")
    return warnings


def _refuse_little_memory(source_bytes: int, memory_bytes: float, where: str) -> None:
    if memory_bytes < PREPARED_TO_SOURCE * source_bytes:
        raise PreflightError(
            f"materialize.cache: memory keeps all prepared rows in memory: {memory_bytes / 1e9:.1f} GB {where} for "
            f"{source_bytes / 1e9:.1f} GB of sources, which may grow {PREPARED_TO_SOURCE:g} times",
            next_step="use materialize.cache: disk",
        )


def machine_cpus() -> float:
    """Return the CPUs that workers may hold on this machine. Two may share one, to try a pipeline out."""
    return float(max(2, len(os.sched_getaffinity(0))))


def check_machine(spec: PipelineSpec) -> None:
    """Compare the workers with this machine, on which Ray will run if no cluster is given.

    Raises:
        PreflightError: there are too few CPUs or GPUs: workers would wait for ever.
    """
    need, has = need_of_worker(spec), {"CPU": machine_cpus(), "memory": float(psutil.virtual_memory().available)}
    if need.get("GPU") or spec.preparing.gpus:
        import torch

        has["GPU"] = float(torch.cuda.device_count())
    missing = missing_for_workers(spec.train.workers, need, [has], where="this machine")
    if missing is not None:
        raise PreflightError(
            f"the workers would wait for ever for {missing}",
            next_step="lower train.workers or what each of them takes (train.cpus_per_worker, train.gpus, "
            "train.resources), or set RAY_ADDRESS to a cluster that has as much",
        )
    if spec.prepare.labels or spec.preparing.resources or (spec.prepare.cpus or 1.0) > has["CPU"]:
        alone = nodes_refused(spec.preparing, [ClusterNode(has, {})])
        if alone is not None:
            raise alone


def check_cluster(project: Project, cluster: RayCluster, *, reads_sources: bool) -> None:
    """Compare the workers with the cluster this process is connected to; check the nodes of one that it has joined.

    Args:
        reads_sources: tasks will read source files, so that the nodes must see them.

    Raises:
        PreflightError: it has too few CPUs or GPUs, or nodes cannot do their part.
    """
    refusal = workers_refused(project.spec, cluster.nodes, cluster.most)
    if refusal is None and reads_sources:
        refusal = tasks_refused(project.spec, cluster.labelled, cluster.most)
    if refusal is not None:
        raise refusal
    if cluster.embedded:
        return
    if project.spec.materialize.cache == "memory" and reads_sources and cluster.most is None:
        # A block lies in the object store of the node whose task has made it.
        holding = [node for node in cluster.labelled if project.spec.preparing.fitting([node])]
        there = sum(node.resources.get("object_store_memory", 0.0) for node in holding)
        stores = f"is in the object stores of the {counted(len(holding), 'node')} that can prepare rows"
        _refuse_little_memory(sum(file.size_bytes for file in project.files), there, stores)
    by_location: dict[str, list[SourceFile]] = {}
    for file in project.files if reads_sources else ():
        by_location.setdefault(file.location, []).append(file)
    # A node that sees the first and the last file of a location has the folder.
    files = [file for found in by_location.values() for file in (found[0], *found[1:][-1:])]
    # The stage keys name the versions on this machine, and the nodes do the work. A module without an installed distribution
    # travels with the user's code, as penstock does.
    used = {name for code in project.codes for name in code.versions}
    used |= {*project.framework.libraries, *format_of(project.spec.data).libraries}
    versions = installed_versions(sorted(used - {"penstock"}))
    refuse_unfit_nodes(cluster, project.storage, {name: found for name, found in versions.items() if found != "absent"}, files)


def check_recipe(project: Project) -> None:
    """Load the recipe, callbacks and the transforms' functions, so that an import error costs nothing.

    Raises:
        SpecError: naming the target and the problem.
    """
    project.framework.check(project.recipe, project.spec.train)
    if project.data_config is not None:
        from penstock.training.session.data_config import whole_datasets  # loads Ray

        whole_datasets(project.data_config, project.spec.data.locations, project.spec.train.workers)
    if project.spec.train.loop is not None:
        from penstock.training.frameworks.ray_train.old_names import refuse_absent_datasets
        from penstock.training.spec import split_names

        data, names = project.spec.data, split_names(project.spec.train.datasets)
        there = [name for name in data.locations if data.place(name) is not None]
        refuse_absent_datasets(project.recipe, [*there, *(name for name, split in names.items() if split in there)])
    if project.callbacks and not getattr(project.framework, "takes_callbacks", False):
        framework = project.spec.train.framework
        raise SpecError(
            f"train.callbacks: {framework} takes no callbacks", next_step="remove them, or use train.framework: torch"
        )
    if project.callbacks:
        from penstock.training.callbacks.callback import load_callbacks  # loads torch

        load_callbacks(project.callbacks)
    for target, code in project.transforms.items():
        loaded = code.load()
        if not callable(loaded) or (inspect.isclass(loaded) and not any("__call__" in vars(each) for each in loaded.__mro__)):
            raise SpecError(f"preprocess: {target} is not a function, nor a class with `__call__`")
