"""Does a process of its own write the same checkpoints, without being in the way, and is nothing lost with it?"""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from penstock.errors import CheckpointError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint import Checkpoint, CheckpointFacts, CheckpointStore, Snapshot
from penstock.training.checkpoint_writer import CheckpointWriter
from penstock.training.commit import commit
from penstock.training.host_copy import copied
from penstock.training.idle_writer import IdleWriter, IdleWriterGoneError
from penstock.training.idle_writer_main import Target
from penstock.training.journal import JournalWriter, Point, read_journal
from penstock.training.mailbox import CheckpointCommitted, Event, Warned
from penstock.training.packed import pack, unpack
from penstock.training.snapshot_memory import SnapshotMemory
from penstock.training.spec import CheckpointSpec
from penstock.training.state_files import NamedTensors, training_file, training_of, weights_of
from penstock.training.weights import weights_digest
from tests.training.digits import ListClient, make_job, train_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has processes that run when nothing else does")

POINTS = [Point(1000 + step, step, {"train/loss": 1 / step}) for step in (1, 2)]


def target(folder: Path, keep: int = 2) -> Target:
    return Target(Storage(str(folder)), CheckpointSpec(keep=keep), attempt=1)


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[IdleWriter]:
    with closing(IdleWriter(target(tmp_path), patience_s=300)) as writer:  # whatever else runs on this machine
        yield writer


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.rand(64, 64, generator=generator),
        "half": torch.rand(3, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "none": torch.zeros(0, 4),
    }


def snapshot(step: int, memory: SnapshotMemory | None = None) -> Snapshot[NamedTensors]:
    facts = CheckpointFacts(step=step, epoch=0, position=step, world_size=2, metrics={"train/loss": None})
    model = {name: copied(tensor, memory) for name, tensor in weights(step).items()}
    training = pack({"optimizer": {"state": {0: {"step": torch.tensor(float(step))}}}, "extra": {}}, memory)
    rest = training_file(training, torch.get_rng_state().expand(2, -1))
    return Snapshot(facts, NamedTensors(model), rest, f"{step:06x}")


def committed(folder: Path) -> list[Checkpoint]:
    return CheckpointStore(Storage(str(folder))).committed()


def process_of(idle: IdleWriter) -> psutil.Process:
    return psutil.Process(idle._process.pid)


def test_it_writes_what_this_process_would(tmp_path: Path, idle: IdleWriter) -> None:
    there, here = tmp_path, tmp_path / "here"
    storage = Storage(str(here))
    for step in (1, 2, 3):
        idle.memory.clear()
        written = idle.write(snapshot(step, idle.memory), POINTS if step == 2 else [])
        assert written == committed(there)[0].name
        commit(CheckpointStore(storage, keep=2), JournalWriter(storage, 1), snapshot(step), POINTS if step == 2 else [])
    manifests = [[item.manifest.model_dump(exclude={"created"}) for item in committed(folder)] for folder in (there, here)]
    assert manifests[0] == manifests[1] and [manifest["step"] for manifest in manifests[0]] == [3, 2]
    assert read_journal(Storage(str(there)), 3) == read_journal(storage, 3) == POINTS
    found, warnings = CheckpointStore(Storage(str(there))).newest_valid()
    assert found is not None and warnings == []
    assert weights_digest(weights_of(found)) == found.manifest.weights_digest == weights_digest(weights(3))
    assert training_of(found)["optimizer"]["state"][0]["step"].item() == 3.0


def test_it_runs_when_nothing_else_does_and_loads_no_torch(idle: IdleWriter) -> None:
    idle.write(snapshot(1), [])
    process = process_of(idle)
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    assert process.ionice().ioclass == psutil.IOPRIO_CLASS_BE
    assert not any("torch" in mapped.path for mapped in process.memory_maps())


def test_signals_that_all_processes_get_do_not_end_it(idle: IdleWriter) -> None:
    idle.write(snapshot(1), [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process_of(idle).send_signal(number)
    assert idle.write(snapshot(2), []) == "step-0000000002-000002"


def test_a_storage_that_refuses_is_the_same_error(tmp_path: Path, idle: IdleWriter) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(
        CheckpointError, match=f"cannot write checkpoint {tmp_path}.*: (NotADirectoryError|FileExistsError)"
    ) as told:
        idle.write(snapshot(1), [])
    assert "free space or restore access" in told.value.next_step
    (tmp_path / "checkpoints").unlink()
    assert idle.write(snapshot(2), []) == "step-0000000002-000002"


def test_what_a_lost_process_was_asked_is_written_here(tmp_path: Path, idle: IdleWriter) -> None:
    news: list[Event] = []
    storage = Storage(str(tmp_path))
    store, journal = CheckpointStore(storage, keep=2), JournalWriter(storage, 1)
    with closing(CheckpointWriter(store, journal, news.append, idle=idle)) as writer:
        for step in (1, 2, 3):
            copies = snapshot(step, writer.memory())
            if step == 2:
                process_of(idle).kill()
            writer.submit(lambda copies=copies: copies, POINTS if step == 2 else [])  # type: ignore[misc]
        name = writer.wait()
    last, before = committed(tmp_path)
    assert (last.name, last.manifest.step, before.manifest.step) == (name, 3, 2)
    assert weights_digest(weights_of(last)) == weights_digest(weights(3))
    assert read_journal(storage, 3) == POINTS
    told = [event.message for event in news if isinstance(event, Warned)]
    assert told == ["the process that writes checkpoints was lost (-9): training writes them itself now"]
    assert [event.step for event in news if isinstance(event, CheckpointCommitted)] == [1, 2, 3]


def test_what_it_committed_before_it_was_lost_is_not_written_again(
    tmp_path: Path, idle: IdleWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    news: list[Event] = []
    storage = Storage(str(tmp_path))

    def lost_with_its_answer(self: IdleWriter, asked: Snapshot[NamedTensors], points: list[Point]) -> None:
        write(self, asked, points)
        raise IdleWriterGoneError

    write = IdleWriter.write
    monkeypatch.setattr(IdleWriter, "write", lost_with_its_answer)
    store = CheckpointStore(storage, keep=1)
    with closing(CheckpointWriter(store, JournalWriter(storage, 1), news.append, idle=idle)) as writer:
        copies = snapshot(1, writer.memory())
        writer.submit(lambda: copies, POINTS)
        first = writer.wait()
        assert [item.name for item in committed(tmp_path)] == [first]
        writer.submit(lambda: snapshot(2), [])
        writer.wait()
    assert [item.manifest.step for item in committed(tmp_path)] == [2]
    assert [event.step for event in news if isinstance(event, CheckpointCommitted)] == [1, 2]


def test_what_it_had_begun_goes_when_it_is_lost(tmp_path: Path) -> None:
    store = CheckpointStore(Storage(str(tmp_path)))
    begun = tmp_path / "checkpoints" / "step-0000000007-000007" / "model.safetensors"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"half")
    assert store.settle(snapshot(7)) is None and not begun.parent.exists()
    whole = store.write(snapshot(7))
    assert store.settle(snapshot(7)) == whole.name and store.problem(whole.name) is None


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "never used, the connection held by a fork"])
def test_it_is_closed_at_once(tmp_path: Path, stopped: bool) -> None:
    idle = IdleWriter(target(tmp_path))
    holder = None
    if stopped:
        process_of(idle).suspend()
    else:
        os.set_inheritable(idle._connection.fileno(), True)
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            pool.submit(idle.close).result(timeout=30)
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()


def test_nothing_waits_for_a_process_that_is_stopped(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    store, journal = CheckpointStore(storage), JournalWriter(storage, 1)
    many = [Point(step, step, {"train/loss": 1 / step}) for step in range(1, 4001)]  # more than a connection takes at once
    news: list[Event] = []
    with closing(IdleWriter(target(tmp_path), patience_s=0.2)) as idle:
        process_of(idle).suspend()
        with closing(CheckpointWriter(store, journal, news.append, idle=idle)) as writer:
            copies = snapshot(1, writer.memory())
            writer.submit(lambda: copies, many)
            assert writer.wait() is not None
    assert [item.manifest.step for item in committed(tmp_path)] == [1]
    assert not any(isinstance(event, Warned) for event in news)  # nothing is wrong


def test_a_request_may_be_large(tmp_path: Path, idle: IdleWriter) -> None:
    many = [Point(step, step, {"train/loss": 1 / step}) for step in range(1, 50_001)]
    idle.write(snapshot(50_000, idle.memory), many)
    assert read_journal(Storage(str(tmp_path)), 50_000) == many


def test_weights_that_are_no_numbers_are_not_sent_to_it(tmp_path: Path, idle: IdleWriter) -> None:
    storage = Storage(str(tmp_path))
    store, journal = CheckpointStore(storage), JournalWriter(storage, 1)
    asked = snapshot(1)
    bad = torch.tensor([1.0, math.nan])
    for tensor in (bad, bad.to(torch.float8_e4m3fn)):
        told = replace(asked, model=NamedTensors({**asked.model.tensors, "bad": tensor}))
        with closing(CheckpointWriter(store, journal, lambda event: None, idle=idle, refuses_nan=True)) as writer:
            writer.submit(lambda told=told: told, [])  # type: ignore[misc]
            with pytest.raises(TrainingError, match="the weight bad is not a number after step 1"):
                writer.wait()
    assert committed(tmp_path) == []


_TRAINER = """
import sys, time
from pathlib import Path
from tests.training.test_idle_writer import IdleWriter, snapshot, target
idle = IdleWriter(target(Path(sys.argv[1])))
idle.write(snapshot(1), [])
print(idle._process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_asks_however_that_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        process = psutil.Process(int(trainer.stdout.readline()))
        assert process.is_running()
        trainer.kill()
    deadline = time.monotonic() + 30
    while runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(process: psutil.Process) -> bool:
    """A process whose parent is gone may stay as a zombie: that is for the system to clear away."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.drill
def test_training_does_not_wait_for_a_process_that_never_gets_to_run(tmp_path: Path) -> None:
    idle = IdleWriter(target(tmp_path), patience_s=1)
    idle.write(snapshot(1), [])
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(idle._process.pid, {core})
    storage = Storage(str(tmp_path))
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    writer = CheckpointWriter(CheckpointStore(storage), JournalWriter(storage, 1), lambda event: None, idle=idle)
    try:
        memory = writer.memory()
        assert memory is not None
        large = copied(torch.rand(60_000_000), memory)  # seconds, for who gets a hundredth of a core
        small = snapshot(2, memory)
        writer.submit(lambda: Snapshot(small.facts, NamedTensors({"large": large}), small.training, small.mark), [])
        written = writer.wait()
    finally:
        writer.close()
        idle.close()
        busy.kill()
        busy.wait()
    assert written is not None and [item.manifest.step for item in committed(tmp_path)] == [2, 1]
    assert idle._process.returncode == -signal.SIGKILL


def test_training_goes_on_where_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("penstock.training.idle_writer.psutil.Popen", no_more)
    client = ListClient()
    train_alone(make_job(tmp_path, max_steps=3), client)
    told = [event.message for event in client.events if isinstance(event, Warned)]
    assert len(told) == 1
    assert re.match(r"no process can be started that writes checkpoints \(.*unavailable\): training does it", told[0])
    assert [item.manifest.step for item in committed(tmp_path / "run")] == [3]


def test_pieces_of_memory_stay_as_they_are_while_it_grows() -> None:
    with closing(SnapshotMemory()) as memory:
        pieces = [memory.empty([40_000], torch.float32).fill_(index) for index in range(50)]
        assert memory.size_bytes >= 50 * 160_000
        assert all(bool((piece == index).all()) for index, piece in enumerate(pieces))
        places = [memory.place(piece) for piece in pieces]
        assert places == sorted({*places}) and all(place % 64 == 0 for place in places)
        content = os.pread(memory.fd, 160_000, places[7])
        assert torch.frombuffer(bytearray(content), dtype=torch.float32).eq(7).all()


def test_what_lies_elsewhere_is_copied_to_its_place() -> None:
    with closing(SnapshotMemory()) as memory:
        across = torch.arange(6.0).view(2, 3).t()
        piece = memory.empty([4, 4], torch.float32)
        piece.copy_(torch.arange(16.0).view(4, 4))
        for tensor in (across, piece.t(), piece[1]):
            content = bytearray(os.pread(memory.fd, tensor.nbytes, memory.place(tensor)))
            assert torch.frombuffer(content, dtype=torch.float32).view(tensor.shape).equal(tensor)
        assert memory.place(torch.zeros(0)) == 0


def test_a_tree_is_packed_into_that_memory() -> None:
    with closing(SnapshotMemory()) as memory:
        tree = {"a": [torch.arange(5), torch.tensor(True)], "b": torch.rand(3, 2).double()}
        packed = pack(tree, memory)
        assert memory.place(packed["bytes"]) == 0
        back = unpack(packed)
        assert back["a"][0].equal(tree["a"][0]) and back["a"][1].item() is True and back["b"].equal(tree["b"])
