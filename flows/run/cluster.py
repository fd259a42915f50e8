"""Can the Ray cluster do what a run asks of it: has it the CPUs and GPUs, and is every node fit for its part?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.errors import PreflightError
from penstock.flows.preflight.cpus import workers_refused
from penstock.flows.servers.nodes import ABSENT, ask_nodes, installed_versions
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.messages import capped, counted
from penstock.storage import Storage
from penstock.tasks.project import Project

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = ["check_cluster", "refuse_unfit_nodes"]


def check_cluster(project: Project, cluster: RayCluster, *, reads_sources: bool) -> None:
    """Compare the workers with the cluster this process is connected to; ask the nodes of one that it has joined.

    Args:
        reads_sources: tasks will read source files, so that the nodes must see them.

    Raises:
        PreflightError: it has too few CPUs or GPUs, or nodes cannot do their part: each is named, and why.
    """
    refusal = workers_refused(project.spec, cluster.nodes, cluster.most)
    if refusal is not None:
        raise refusal
    if cluster.embedded:
        return
    files = _first_and_last(project.files) if reads_sources else []
    refuse_unfit_nodes(cluster, project.storage, _versions_in_keys(project), files)


def refuse_unfit_nodes(
    cluster: RayCluster, storage: Storage, versions: Mapping[str, str], files: Sequence[SourceFile] = ()
) -> None:
    """Ask every node whether it reaches the storage, can read `files` and has the same versions.

    Raises:
        PreflightError: nodes cannot do their part: each is named, and why.
    """
    troubles = ask_nodes(storage, versions, files)
    if not troubles:
        return
    nodes_by_what: dict[str, list[str]] = {}
    for trouble in troubles:
        nodes_by_what.setdefault(trouble.what, []).append(trouble.node)
    count = len({trouble.node for trouble in troubles})
    raise PreflightError(
        f"{counted(count, 'node')} of the Ray cluster {cluster.address} cannot take part in this run",
        problems=[f"{', '.join(capped(nodes, 5))}: {what}" for what, nodes in nodes_by_what.items()],
        next_step="; ".join(dict.fromkeys(trouble.fix for trouble in troubles)),
    )


def _versions_in_keys(project: Project) -> dict[str, str]:
    """What the stage keys say of this machine must hold for the nodes, which do the work.

    What is no installed distribution travels with the user's code, as penstock itself does.
    """
    codes = project.codes
    read_by = format_of(project.spec.data).libraries
    names = {*project.framework.libraries, *read_by, *(name for code in codes for name in code.versions)} - {"penstock"}
    return {name: found for name, found in installed_versions(sorted(names)).items() if found != ABSENT}


def _first_and_last(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Of each location: a node that sees these has the folder."""
    by_location: dict[str, list[SourceFile]] = {}
    for file in files:
        by_location.setdefault(file.location, []).append(file)
    return [file for found in by_location.values() for file in (found[0], *found[1:][-1:])]
