"""What is the same for frameworks whose training is a function `fit(job, group, session)` on Ray Train workers?"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

from penstock.digest import bytes_digest
from penstock.training.events import Event
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.on_ray import trainer
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.session.attempt import run_session

__all__ = ["OwnLoop"]


class OwnLoop:
    """Brings `train` of a `penstock.training.frameworks.framework.Framework`.

    Attributes:
        fit: `module:function`, called with (job, group, session) on each worker. The module is imported there alone, since the
            library takes seconds to load.
        model_files: as of `Framework`; the first has the weights.
    """

    fit: str
    model_files: tuple[str, ...]

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """What each worker does; arguments as of on_ray/worker.py's `run_rank`."""
        return partial(_run_own_loop, self.fit, self.model_files)

    def train(
        self,
        job: TrainJob,
        *,
        stop: threading.Event,
        listener: Callable[[list[Event]], None],
        own_cluster: bool = False,
    ) -> TrainOutcome:
        """Call `fit` on Ray Train workers."""
        work, options = self.run_rank, {"own_cluster": own_cluster, "in_ray_train": True}
        return trainer.train(job, stop=stop, listener=listener, work=work, **options)


def _run_own_loop(
    fit: str,
    model_files: Sequence[str],
    job: TrainJob,
    group: Group,
    client: MailboxClient,
    *,
    stop: bool = False,
    restart: int = 0,
) -> RankResult:
    module, _, name = fit.partition(":")
    function = getattr(importlib.import_module(module), name)
    return run_session(
        job,
        group,
        client,
        partial(function, job, group),
        stop=stop,
        restart=restart,
        digest=lambda files: bytes_digest(files[model_files[0]]),
        apart=model_files,
        restores_all=True,
    )
