"""What does Ray Train's controller do for us? It retries no error that a user must correct, and reports to the driver.

A small module of its own: Ray Train's controller imports it before it starts a worker, and the first step waits for that.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

import ray
import ray.train
from ray.train.v2._internal.execution.callback import ControllerCallback
from ray.train.v2._internal.execution.controller.state import RestartingState, SchedulingState
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup

from penstock.errors import PenstockError
from penstock.training.on_ray.mailbox import MailboxHandle

__all__ = ["FixedWorkers", "NoRetryOfUserErrors", "ReportsToDriver", "keep_ranks_on_their_nodes"]


class ReportsToDriver(ControllerCallback):
    """Puts the controller's actor handle into the mailbox, without which a driver can only wait for `fit()`, not end it.

    Also reports lost workers and the start of a worker group, before it runs. `hosts` are for `keep_ranks_on_their_nodes`.
    """

    def __init__(self, mailbox: MailboxHandle, hosts: Sequence[str] = ()) -> None:
        self._mailbox, self._hosts = mailbox, hosts

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called once, before the first worker starts."""
        keep_ranks_on_their_nodes(self._hosts)
        self._mailbox.call("controlled_by", ray.get_runtime_context().current_actor)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Called when the state of Ray Train changes."""
        if isinstance(current_state, RestartingState):
            lost = getattr(current_state.training_failed_error, "worker_failures", {})
            self._mailbox.call("lost", sorted(lost))
        elif isinstance(current_state, SchedulingState):
            self._mailbox.call("starting")


def keep_ranks_on_their_nodes(hosts: Sequence[str] = ()) -> None:
    """Let Ray Train give each node the ranks that it had, so that a restart finds their shards there.

    New nodes take the places of lost ones, in the order of their addresses, so that no other rank moves. Ray numbers workers as
    placement found the nodes: of 16 placements on the same four idle nodes hardly two were alike (2.60).

    Args:
        hosts: by rank, of the worker group before; empty for a new run.
    """
    known = list(dict.fromkeys(hosts))
    by_node = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node

    def in_places(workers: list[Worker], first_id: str | None = None) -> list[Worker]:
        nonlocal known
        nodes: dict[str, list[Worker]] = {}
        for each in by_node(sorted(workers, key=lambda worker: ipaddress.ip_address(worker.metadata.node_ip).packed), first_id):
            nodes.setdefault(each.metadata.hostname, []).append(each)
        new = [host for host in nodes if host not in known]
        known = [host if host in nodes or not new else new.pop(0) for host in known] + new
        return [each for host in known for each in nodes.get(host, [])]

    WorkerGroup._sort_workers_by_gpu_id_grouped_by_node = staticmethod(in_places)  # type: ignore[assignment]


class NoRetryOfUserErrors(ray.train.UserCallback):
    """Ends the run when a worker failed with an error that a restart would only repeat.

    Ray Train retries every exception of a worker, but none that a callback of its controller raises.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the first such error."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, PenstockError) and not error.transient:
                raise error


class FixedWorkers(FixedScalingPolicy):
    """Asks no autoscaler for the workers, for a cluster that does not grow.

    Asking takes an actor, whose start the controller would wait for: all processes took 28.8 s of CPU instead of 25.1 s up to
    the first step of two workers (2026-11-26, two cores of an Intel Xeon with other work, medians of five turns).
    """

    def _send_resource_request(self) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass
