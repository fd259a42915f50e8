"""What does MLflow still say of a run whose process vanished, and how is it put right?"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.training.events import Point
from penstock.training.tracking import mlflow_backend
from penstock.training.tracking.sender import Outbox, Sender
from penstock.training.tracking.tracker import RunStatus, Tracker

__all__ = ["repair"]

_log = logging.getLogger("penstock.tracking")


def repair(
    tracking_uri: str,
    run_id: str,
    *,
    status: RunStatus,
    tags: Mapping[str, str] | None = None,
    points: Iterable[Point] = (),
    outbox: Storage | None = None,
    drain_s: float = 10.0,
) -> str:
    """Finish what a killed driver left: deliver its outbox and journal, and replace the status RUNNING by `status`.

    The caller has made sure that no living process owns the run. A status waiting in the outbox counts more than `status`: the
    process that wrote it knew. Returns the status the server has afterwards; `UNKNOWN` if it does not answer or lacks the run.
    """
    try:
        client = mlflow_backend.open_client(tracking_uri)
        run = client.get_run(run_id)
        sender = Sender(mlflow_backend.MlflowTransport(mlflow_backend.describe_run(client, run)), outbox)
        tracker = Tracker(mlflow_backend.describe_run(client, run), tracking_uri, sender, attempt=0)
        left = Outbox.load(outbox)
        tracker.points(sender.recover(left))
        tracker.replay(points)
        sender.start()
        if run.info.status == "RUNNING" and all(operation.kind != "status" for operation in left.operations):
            tracker._put("status", status=status)
        if tags:
            tracker.set_tags(tags)
        sender.drain(drain_s)
        sender.stop()
        return str(client.get_run(run_id).info.status)
    except Exception as error:  # `status` must show the runs whatever MLflow says
        _log.warning("cannot repair MLflow run %s at %s: %s", run_id, redact_text(tracking_uri), str(error).splitlines()[0])
        return "UNKNOWN"
