"""Will a continued run give the bits of an uninterrupted one? Compares environment and settings with the checkpoint's."""

from __future__ import annotations

import itertools
import platform
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import PIL
import torch

import penstock
from penstock.errors import ResumeError
from penstock.ingest.schema import FeedSchema
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts
from penstock.training.state import TrainState

__all__ = [
    "BIT_EXACT",
    "check_identity",
    "continue_from",
    "environment_of",
    "environment_of_all",
    "judge",
    "reporting_nondeterminism",
    "with_reason",
]

BIT_EXACT = "bit-exact"

_SAME_ORDER = "same-order: "

_NOT_DETERMINISTIC = re.compile(
    "(.*?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
)
"""Torch's warnings; the second is of attention's backward on a GPU."""

_DECISIVE = {
    "torch": "torch",
    "device": "device",
    "cpu": "CPU",
    "threads": "torch threads",
    "cuda": "CUDA",
    "images": "Pillow",
    "nodes": "GPUs on each node",
}
"""Parts of the environment that floating-point results depend on, with their names in messages."""


def environment_of(device: torch.device, schema: FeedSchema | None = None) -> dict[str, str]:
    """Describe versions and hardware of this process that bits may depend on; see `environment_of_all`.

    Args:
        schema: of the rows; None if training decodes no images.
    """
    decodes = schema is not None and any(column.encoded for column in schema.columns)
    is_gpu = device.type == "cuda"
    return {
        "penstock": penstock.__version__,
        "python": platform.python_version(),
        "ray": version("ray"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "cuda": str(torch.version.cuda) if is_gpu else "none",
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_model()}",
        "threads": str(torch.get_num_threads()),
        "host": platform.node(),
        "boot": _text_of("/proc/sys/kernel/random/boot_id").strip(),
        **({"images": f"{PIL.__version__}, simplejpeg {version('simplejpeg')}"} if decodes else {}),
    }


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # Linux only
        return ""


def _cpu_model() -> str:
    """Return the name of the CPU: torch's libraries choose kernels by its maker and model."""
    lines = (line.partition(":") for line in _text_of("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


def environment_of_all(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Combine the environments of all ranks: differences are listed by rank, and `nodes` counts the GPUs of each machine.

    NCCL sums within a machine first; for Gloo the machine does not matter.
    """
    hosts = [f"{rank['host']} {rank['boot']}" for rank in ranks]
    together: dict[str, str] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank if name not in ("host", "boot")):
        values = [rank.get(name, "none") for rank in ranks]
        shared = len(set(values)) == 1
        together[name] = values[0] if shared else ", ".join(f"rank {number}: {value}" for number, value in enumerate(values))
    if any(rank["cuda"] != "none" for rank in ranks):
        together["nodes"] = "+".join(str(len(list(group))) for _, group in itertools.groupby(hosts))
    return together


def judge(facts: CheckpointFacts, world_size: int, settings: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return `bit-exact`, or `same-order: ` with the changes since the checkpoint.

    A run that was once continued under other conditions stays `same-order`: its weights differ from then on.
    """
    changes = []
    if facts.world_size != world_size:
        changes.append(f"workers {facts.world_size} -> {world_size}")
    for key, name in _DECISIVE.items():
        before, now = facts.environment.get(key), environment.get(key)
        if before != now:
            changes.append(f"{name} {before} -> {now}")
    for path in sorted({*facts.settings, *settings}):
        before, now = facts.settings.get(path), settings.get(path)
        if isinstance(before, dict) and isinstance(now, dict):
            names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
            changes += [f"{path} ({', '.join(names)})"] if names else []
        elif before != now:
            changes.append(f"{path} {before} -> {now}")
    exactness = facts.exactness
    for change in [*changes, *facts.caveats]:
        exactness = with_reason(exactness, change)
    return exactness


def with_reason(exactness: str, reason: str) -> str:
    """Add a reason why bits may differ to `exactness`."""
    reasons = [] if exactness == BIT_EXACT else [exactness.removeprefix(_SAME_ORDER)]  # which may have commas
    return exactness if f", {reason}, " in f", {', '.join(reasons)}, " else _SAME_ORDER + ", ".join([*reasons, reason])


@contextmanager
def reporting_nondeterminism(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with the name of each nondeterministic operation that runs in the block, whenever torch would warn.

    It is called in any thread of this process. The warning itself is shown once for each operation.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_NOT_DETERMINISTIC.pattern)
        show, shown = warnings.showwarning, set[str]()

        def seen(message: Warning | str, *others: Any, **more: Any) -> None:
            found = _NOT_DETERMINISTIC.match(str(message))
            if found:
                report(found[1])
            if not found or found[1] not in shown:
                shown.add(found[1] if found else "")
                show(message, *others, **more)

        warnings.showwarning = seen
        yield


def continue_from(
    checkpoint: Checkpoint | None,
    identity: Mapping[str, str],
    world_size: int,
    settings: Mapping[str, Any],
    environment: Mapping[str, str],
) -> CheckpointFacts:
    """Return the facts of the checkpoints written from here on, at the state of `checkpoint`, or the begin of training.

    Raises:
        ResumeError: the checkpoint is from another training.
    """
    state, exactness = TrainState(), BIT_EXACT
    if checkpoint is not None:
        check_identity(checkpoint.manifest, identity, checkpoint.name)
        state, exactness = checkpoint.state, judge(checkpoint.manifest, world_size, settings, environment)
    return CheckpointFacts.at(
        state,
        world_size=world_size,
        identity=dict(identity),
        settings=dict(settings),
        environment=dict(environment),
        exactness=exactness,
    )


def check_identity(facts: CheckpointFacts, identity: Mapping[str, str], checkpoint: str) -> None:
    """Refuse to continue with other data, another order, or other batches.

    Raises:
        ResumeError: a value differs; all of them are listed.
    """
    problems = [
        f"{name}: the checkpoint has {facts.identity.get(name)}, this run has {identity.get(name)}"
        for name in sorted({*facts.identity, *identity})
        if facts.identity.get(name) != identity.get(name)
    ]
    if problems:
        raise ResumeError(
            f"checkpoint {checkpoint} belongs to another training",
            problems=problems,
            next_step="undo the change, or start over with `penstock run FILE --fresh`",
        )
