"""Does a loop that continues from a checkpoint stand where it stood, to the bit? Compares what was seen after the report.

Between a report and the batch that follows, a loop may still go on: turn the rate down, draw numbers. So what counts is the
moment at which it takes the next batch, and what it learns of that: the gradients at its first optimizer step. Each rank writes
both down beside the checkpoints; a run that continues from that checkpoint compares them with its own.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field, ValidationError
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock.config import Section
from penstock.errors import PenstockError
from penstock.messages import counted, said_of
from penstock.training.checkpoint.manifest import CheckpointManifest
from penstock.training.frameworks.ray_train.restoring.seen_state import (
    Look,
    SeenState,
    gradients_digest,
    look,
    user_frames,
)
from penstock.training.job import TrainJob
from penstock.training.ranks import Group

__all__ = ["NOT_YET", "Witness"]

NOT_YET = "what train_func restores of a checkpoint shows at its first batch"
_NOBODY_SAW = (
    "what train_func restores of a checkpoint is its own affair: the run before ended before its first step behind that and "
    "left nothing to compare with"
)
_NOT_SEEN = (
    "what train_func restores of a checkpoint was not seen: its thread took no batch of the train shard or made no step with "
    "a torch optimizer"
)
_DRAWN = (
    "random numbers are not where they were: draw none between a report and the next batch of a shard; without a shard "
    "add `state['random'] = torch.get_rng_state()` where it reports and `torch.set_rng_state(state['random'])` "
    "where it restores"
)
_OTHER_GRADIENTS = (
    "the gradients of the first step are not what they were: train_func has a state that nobody sees or goes on in other rows "
    "of its own"
)
_SAVED_AND_PUT_BACK = {
    "state_dict": ("{0}.state_dict()", "{0}.load_state_dict({1})"),
    "torch": ("{0}.get_state()", "{0}.set_state({1})"),
    "bit_generator": ("{0}.bit_generator.state", "{0}.bit_generator.state = {1}"),
    "RandomState": ("{0}.get_state()", "{0}.set_state({1})"),
    "Random": ("{0}.getstate()", "{0}.setstate({1})"),
    "plain": ("{0}", "{0} = {1}"),
}
_SHOWN = 5
"""Differences that are told one by one."""


class _Stood(Section):
    """What was seen of one rank behind one checkpoint."""

    checkpoint: str
    world_size: int
    moment: str
    """`batch` or `step`: what came first."""
    place: tuple[str, ...]
    state: dict[str, SeenState]
    unbound: tuple[str, ...]
    gradients: str | None = None
    """At the first optimizer step."""
    counts: dict[str, SeenState] = Field(default_factory=dict)
    """Numbers that variables hold at that step."""


class _Record(Section):
    """A rank's file: of the two newest checkpoints, as the newest may never be committed."""

    stood: tuple[_Stood, ...] = ()


class Witness:
    """One rank's; its methods are called in the thread of the loop.

    Args:
        job: what is trained.
        group: the ranks.
        function: the loop.
        writer: the name of this rank 0 in manifests.
        continued: manifest of the checkpoint that training continues from.
    """

    def __init__(
        self, job: TrainJob, group: Group, function: Callable[..., Any], writer: str, continued: CheckpointManifest | None
    ) -> None:
        self._package, self._writer = function.__module__.partition(".")[0], writer
        self._params = job.code.located(dict(job.spec.params))
        self._storage, self._file = job.run_storage, f"stood/rank-{group.rank}.json"
        self._world_size, self._device = group.world_size, group.device
        self._thread = threading.get_ident()
        self._hook = register_optimizer_step_pre_hook(self._step)
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-stood")
        self._record = self._read()
        self._checkpoint: str | None = _name(continued.writer, continued.step) if continued is not None else None
        """The one behind which the loop is, until its first step there was seen."""
        self._compares = continued is not None
        known = (
            each for each in self._record.stood if (each.checkpoint, each.world_size) == (self._checkpoint, group.world_size)
        )
        self._before: _Stood | None = next(known, None)
        self._now: _Stood | None = None
        self._failed: str | None = None
        self._reasons: list[str] = []
        """What the comparison has found, once the loop has reported again."""

    def close(self) -> None:
        """Look no longer."""
        self._hook.remove()
        self._saver.shutdown(wait=True)

    def reported(self, step: int) -> None:
        """The loop has reported a checkpoint."""
        if self._compares:
            self._reasons, self._compares = self.reasons(), False
        self._checkpoint, self._now = _name(self._writer, step), None

    def batch(self) -> None:
        """The loop takes a batch of the train split."""
        if self._checkpoint is not None and self._now is None and threading.get_ident() == self._thread:
            self._now = self._seen("batch")
            self._keep()

    def only_looked(self) -> None:
        """The batch taken last was put back."""
        self._now = None

    @property
    def has_compared(self) -> bool:
        """Whether `reasons` come from a comparison."""
        return self._before is not None and (self._now is not None or not self._compares)

    def reasons(self) -> list[str]:
        """Why what follows may not be what an undisturbed run would do. None of a run that continues from no checkpoint."""
        if not self._compares:
            return self._reasons
        if self._failed is not None:
            return [self._failed]
        if self._now is None:
            return [_NOT_SEEN]
        if self._before is None:
            return [_NOBODY_SAW]
        if found := _differences(self._before, self._now):
            return found
        if self._now.gradients is None:
            return [_NOT_SEEN]
        return [_NOBODY_SAW] if self._before.gradients is None else []

    def _step(self, optimizer: Optimizer, *_given: Any) -> None:
        if self._checkpoint is None or threading.get_ident() != self._thread:
            return
        seen = self._now or self._seen("step")
        if seen is not None and seen.gradients is None:
            parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
            counts = self._look(numbers_only=True)
            try:
                gradients = gradients_digest(parameters)
            except Exception as error:  # of a kind of tensor that has no plain bytes
                self._give_up(error)
                return
            if counts is not None:
                self._now = seen.model_copy(update={"gradients": gradients, "counts": counts.state})
                self._keep()

    def _seen(self, moment: str) -> _Stood | None:
        there = self._look()
        if there is None:
            return None
        return _Stood(
            checkpoint=self._checkpoint or "",
            world_size=self._world_size,
            moment=moment,
            place=tuple(there.place),
            state=there.state,
            unbound=tuple(there.unbound),
        )

    def _look(self, *, numbers_only: bool = False) -> Look | None:
        frames = user_frames(self._package, sys._getframe())
        try:
            return look(self._package, frames, self._params, self._device, numbers_only=numbers_only) if frames else None
        except Exception as error:  # of an object of the user's, asked for its state
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._checkpoint = None
        self._failed = f"what train_func restores of a checkpoint cannot be seen: {said_of(error).replace(', ', '; ')}"

    def _keep(self) -> None:
        """Write down what an undisturbed run stands with; what a comparison sees is not that."""
        if self._now is None or self._compares:
            return
        others = [each for each in self._record.stood if each.checkpoint != self._now.checkpoint]
        self._record = _Record(stood=(self._now, *others[:1]))
        content = self._record.model_dump_json().encode()
        self._saver.submit(self._write, content)

    def _write(self, content: bytes) -> None:
        with contextlib.suppress(PenstockError, OSError):  # a run that continues then says that there is nothing to compare
            self._storage.write_bytes(self._file, content)

    def _read(self) -> _Record:
        with contextlib.suppress(PenstockError, OSError, ValidationError):
            return _Record.model_validate_json(self._storage.read_bytes(self._file))
        return _Record()


def _name(writer: str, step: int) -> str:
    return f"{writer}/{step}"


def _differences(before: _Stood, now: _Stood) -> list[str]:
    if (before.moment, before.place) != (now.moment, now.place):
        then, here = (" in ".join(reversed(each.place)) for each in (before, now))
        return [
            f"train_func went on with a {before.moment} at {then} and continues with a {now.moment} at {here}: report where "
            "the next thing that it does is to take a batch"
        ]
    found = [*_changed(before.state, now.state, {*before.unbound, *now.unbound})]
    if before.gradients is not None and now.gradients is not None and not found:
        found = [*_changed(before.counts, now.counts, set())]
        found += [_OTHER_GRADIENTS] if before.gradients != now.gradients else []
    more = len(found) - _SHOWN
    return found if more <= 0 else [*found[:_SHOWN], f"{counted(more, 'more thing')} like these"]


def _changed(before: Mapping[str, SeenState], now: Mapping[str, SeenState], unbound: set[str]) -> Iterator[str]:
    """Sentences about what is not as it was. A variable without a value was not read, or the code would have failed."""
    for name in sorted({*before, *now}):
        then, here = before.get(name), now.get(name)
        if then == here or _variable(name) in unbound:
            continue
        seen = then or here
        assert seen is not None
        yield _DRAWN if seen.kind == "global" else _said(name, seen, then, here)


def _variable(name: str) -> str:
    owner, _, path = name.partition(": ")
    end = min((at for at in map(path.find, ".[") if at > 0), default=len(path))
    return f"{owner}: {path[:end]}"


def _said(name: str, seen: SeenState, then: SeenState | None, here: SeenState | None) -> str:
    owner, _, path = name.partition(": ")
    save, put_back = _SAVED_AND_PUT_BACK[seen.kind]
    key = f"state[{path.replace(chr(39), '')!r}]"
    is_number = seen.kind == "plain" and len(seen.value) < 32  # a digest is as long
    was = f"was {then.value if then else 'not there'} and is {here.value if here else 'not there'}"
    return (
        f"`{path}` of {owner} {was if is_number else f'({seen.type}) is not what it was'}: add `{key} = {save.format(path)}` "
        f"where it reports and `{put_back.format(path, key)}` where it restores"
    )
