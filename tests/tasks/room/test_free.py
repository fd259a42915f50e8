"""Deleting: what stays is whole, a kill at any moment leaves nothing half, and runs that begin meanwhile lose nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import LeaseHeldError, ResumeError
from penstock.ingest.feed.node_cache import NodeCache, hold_shard
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import damaged_shards, materialize
from penstock.ingest.materialize.in_use import ROOM_LEASE
from penstock.ingest.ray_tasks import local_map
from penstock.lease import current_holder, hold_lease
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger, run_leases, sweep_lease_path
from penstock.tasks.room.free import Cleaning, clean
from penstock.tasks.room.plan import Going, RoomPlan
from penstock.tasks.room.spec import RetentionSpec
from tests import ROOT
from tests.ingest.preparing import ONE_FILE_PER_UNIT
from tests.tasks.room.recorded_nights import begin, night, nights, prepare, source_of, use_rows

ONE = RetentionSpec(keep_runs=1)


def cleaning(storage: Storage, retention: RetentionSpec = ONE, **more: Any) -> Cleaning:
    return Cleaning(Ledger(storage), "p", retention, {}, "penstock clean of ann", **more)


def quiet(plan: RoomPlan) -> None:
    """Hear what goes."""


def freed(storage: Storage, tell: Callable[[RoomPlan], None] = quiet, **more: Any) -> tuple[Going, ...]:
    return clean(cleaning(storage, **more), tell)


def layout(storage: Storage) -> set[str]:
    """Files of runs and rows, without leases."""
    return {path for folder in ("runs", "datasets", "units", "stages", "profiles") for path in storage.tree(folder)}


def check_room(storage: Storage, kept: DatasetManifest) -> None:
    """That only the last run's data are there, and that they are whole."""
    assert damaged_shards(storage, kept, deep=True) == []
    files = layout(storage)
    assert {path.split("/")[1] for path in files if path.startswith("units/")} == {unit.key for unit in kept.units}
    assert {path.split("/")[1] for path in files if path.startswith("datasets/")} == {kept.key}
    assert {path.split("/")[1] for path in files if "/checkpoints/" in path} == {kept.key.replace("materialize-", "r0")}


@pytest.fixture(params=["on a disk", "in a store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "state") if request.param == "on a disk" else request.getfixturevalue("s3_bucket") + "/state")


def test_what_goes_is_said_first_then_gone_and_records_say_when_and_by_whom(storage: Storage, tmp_path: Path) -> None:
    made = nights(storage, tmp_path, 3)
    if not storage.is_local:
        held = [hold_shard(storage, manifest.shards[0]).path for manifest in made]
    before = layout(storage)
    told: list[RoomPlan] = []

    def tell(plan: RoomPlan) -> None:
        told.append(plan)
        assert layout(storage) == before

    gone = freed(storage, tell)
    assert [plan.going for plan in told] == [gone]
    assert {each.name for each in gone if each.kind == "run"} == {"r01", "r02"}
    check_room(storage, made[-1])
    ledger = Ledger(storage)
    assert [str(run.cleaned) if run.cleaned else None for run in ledger.runs()][1:] == [
        f"cleaned on {dt.datetime.now(dt.UTC).date()} by penstock clean of ann",
        None,
    ]
    assert ledger.attempts("r01") and ledger.code_of("r01") == {}
    small = {run: len(storage.read_bytes(f"runs/{run}/run.json")) for run in ("r01", "r03")}
    assert small["r01"] < small["r03"] == len(storage.read_record("runs/r03/run.json")), "what stays of it is compressed"
    # Rows by split and digests stay readable; nothing is reused.
    path = "stages/materialize/materialize-1.json"
    assert ledger.stage_record(path, "materialize-1") is None
    record = ledger.stage_record(path, "materialize-1", cleaned=True)
    assert record is not None and DatasetManifest.model_validate(record.output).rows == made[0].rows
    assert ledger.run_with_training("p", "train-1") is None and ledger.run_with_training("p", "train-3") is not None
    if not storage.is_local:
        assert [path.exists() for path in held] == [False, False, True]
    assert freed(storage) == ()


def test_rows_that_were_cleaned_are_prepared_again_by_a_run_that_goes_back(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    first, _ = nights(storage, tmp_path, 2)
    freed(storage)
    (tmp_path / "train" / "1.parquet").unlink()
    again = use_rows(Ledger(storage), begin(Ledger(storage), "r09", "1", day=9), source_of(tmp_path, 1))
    assert again.content_digest == first.content_digest and damaged_shards(storage, again, deep=True) == []


def test_a_run_whose_record_cannot_be_read_stops_it_before_anything_goes(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    nights(storage, tmp_path, 2)
    storage.write_bytes("runs/r01/run.json", b'{"version": 9}')
    before = layout(storage)
    with pytest.raises(ResumeError, match="record of run r01 cannot be read"):
        freed(storage)
    assert layout(storage) == before


RUN_LEASE = f"{run_leases('p')}/r01"


@pytest.mark.parametrize("lease", [RUN_LEASE, sweep_lease_path("p"), sweep_lease_path("q")])
def test_runs_stay_while_a_process_works_on_them_and_rows_while_a_sweep_is_at_work(tmp_path: Path, lease: str) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    prepare(source_of(tmp_path, 1), storage, "of-no-run")
    with hold_lease(storage, lease):
        kinds = {each.kind for each in freed(storage)}
    assert kinds == {RUN_LEASE: {"dataset"}, sweep_lease_path("p"): set(), sweep_lease_path("q"): {"run"}}[lease]
    assert {each.kind for each in freed(storage)} >= {"unit"} - kinds


@pytest.mark.parametrize(("status", "goes"), [("done", {"r01"}), ("running", set())])
def test_a_run_that_is_done_and_cleans_up_is_the_newest(tmp_path: Path, status: Any, goes: set[str]) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    ledger = Ledger(storage)
    newest = ledger.current_run("p")
    assert newest is not None and newest.run == "r02"
    ledger.save_run(newest.model_copy(update={"status": status}))
    with hold_lease(storage, f"{run_leases('p')}/r02"):
        assert {each.name for each in freed(storage) if each.kind == "run"} == goes


def test_two_cleanings_at_once_are_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    with hold_lease(storage, ROOM_LEASE), pytest.raises(LeaseHeldError, match="another cleaning is at work"):
        freed(storage)


# A kill.


class Dying(Storage):
    """Its process is killed instead of making the change number `at`."""

    at = 0

    def _count(self) -> None:
        Dying.at -= 1
        if Dying.at == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_bytes(self, path: str, data: bytes) -> None:
        self._count()
        super().write_bytes(path, data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        self._count()
        return super().create_exclusive(path, data)

    def delete(self, path: str) -> None:
        self._count()
        super().delete(path)

    def child(self, path: str) -> Storage:
        return Dying(self.uri(path))


def killed(storage: Storage, at: int) -> bool:
    """Clean in another process, which is killed at its change number `at`; False if it ended before that."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            Dying.at = at
            clean(cleaning(Dying(storage.root)), quiet)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_killed_at_any_change_it_leaves_what_stays_whole_and_the_next_one_ends_it(tmp_path: Path) -> None:
    kept = nights(Storage(str(tmp_path / "state")), tmp_path, 2)[-1]
    moments = 0
    while True:
        storage = Storage(str(tmp_path / f"killed-{moments + 1}"))
        shutil.copytree(tmp_path / "state", storage.root)
        if not killed(storage, moments + 1):
            break
        moments += 1
        assert damaged_shards(storage, kept, deep=True) == []
        for dataset in storage.list("datasets"):  # one that can be opened has all its rows
            with contextlib.suppress(FileNotFoundError):
                manifest = DatasetManifest.model_validate(storage.read_json(f"datasets/{dataset}/manifest.json"))
                assert damaged_shards(storage, manifest, deep=True) == []
        for run in storage.list("runs"):  # a checkpoint that counts has all its files
            if storage.exists(f"runs/{run}/checkpoints/step-1/manifest.json"):
                assert storage.exists(f"runs/{run}/checkpoints/step-1/model.safetensors")
        freed(storage)
        check_room(storage, kept)
    assert moments > 15
    check_room(storage, kept)


# Runs that begin meanwhile.


def test_a_run_that_has_begun_to_use_old_rows_keeps_them(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    first, second, _ = nights(storage, tmp_path, 3)
    ledger = Ledger(storage)
    record = storage.read_bytes("stages/materialize/materialize-1.json")

    def tell(plan: RoomPlan) -> None:
        assert {"materialize-1", "materialize-2"} == plan.names("dataset")
        begin(ledger, "theirs", "1", pipeline="q")

    gone = freed(storage, tell)
    assert {each.name for each in gone if each.kind == "dataset"} == {"materialize-2"}
    assert storage.read_bytes("stages/materialize/materialize-1.json") == record
    assert damaged_shards(storage, first, deep=True) == [] and damaged_shards(storage, second, deep=True)
    assert ledger.runs_with_alias("p") == []


def test_a_run_that_begins_with_the_weights_of_an_old_one_keeps_it(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    ledger = Ledger(storage)

    def tell(plan: RoomPlan) -> None:
        run = begin(ledger, "theirs", "9", pipeline="q")
        ledger.save_run(run.model_copy(update={"spec": {"name": "q", "train": {"start_from": "run:r01"}}}))

    assert "run" not in {each.kind for each in freed(storage, tell)}
    run = ledger.load_run("r01")
    assert run is not None and run.cleaned is None and storage.exists("runs/r01/checkpoints/step-1/model.safetensors")


class Slow(Storage):
    """Waits before it deletes the first unit."""

    def __init__(self, root: str, begun: threading.Event, go: threading.Event) -> None:
        super().__init__(root)
        self.begun, self.go = begun, go

    def delete(self, path: str) -> None:
        if path.startswith("units/"):
            self.begun.set()
            assert self.go.wait(60)
        super().delete(path)


def test_a_run_that_needs_what_is_being_deleted_waits_and_prepares_it_again(tmp_path: Path) -> None:
    storage, begun, go = Storage(str(tmp_path / "state")), threading.Event(), threading.Event()
    nights(storage, tmp_path, 2)
    cleaner = threading.Thread(target=freed, args=[Slow(storage.root, begun, go)])
    cleaner.start()
    assert begun.wait(60)
    (tmp_path / "train" / "1.parquet").unlink()
    source, waited = source_of(tmp_path, 1), threading.Event()

    def progress(done: float, total: float | None, unit: str, note: str = "") -> None:
        if note.startswith("waiting for a cleaning"):
            waited.set()
            go.set()

    begin(Ledger(storage), "theirs", "1", pipeline="q")
    manifest = materialize(
        key="materialize-1",
        preparation=source.preparation(),
        spec=ONE_FILE_PER_UNIT,
        storage=storage,
        progress=progress,
        parallel=local_map,
    )
    cleaner.join()
    assert waited.is_set() and damaged_shards(storage, manifest, deep=True) == []


CLEANER = """
import sys
from pathlib import Path
from penstock.storage import Storage
from tests.tasks.room.test_free import freed
print("begins", flush=True)
while not Path(sys.argv[2]).exists():
    freed(Storage(sys.argv[1]))
"""


@contextlib.contextmanager
def cleaning_again_and_again(storage: Storage, stop: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CLEANER, storage.root, str(stop)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        yield process
        stop.touch()
    assert process.returncode == 0


def test_runs_that_come_and_go_beside_a_cleaning_process_always_have_their_rows(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    kept = nights(storage, tmp_path, 1)[0]
    ledger, prepared = Ledger(storage), 0
    sources = {key: source_of(tmp_path / key, 2 + number) for number, key in enumerate(("a", "b"))}
    with cleaning_again_and_again(storage, tmp_path / "stop"):
        for number in range(24):
            key = ("a", "b")[number // 2 % 2]
            had = storage.exists(f"stages/materialize/materialize-{key}.json")
            with hold_lease(storage, f"{run_leases('q')}/q{number}"):
                run = begin(ledger, f"q{number}", key, pipeline="q")
                manifest = use_rows(ledger, run, sources[key])
                for _ in range(3):
                    assert damaged_shards(storage, manifest, deep=True) == []
                storage.delete(f"runs/{run.run}")  # nothing refers to its rows any more
            prepared += not had
    assert current_holder(storage, ROOM_LEASE) is None
    assert damaged_shards(storage, kept, deep=True) == []
    freed(storage)
    assert storage.list("datasets") == ["materialize-1"]


@pytest.mark.drill
def test_sixty_nights_of_the_same_size_take_no_more_room_than_ten_but_for_small_records(tmp_path: Path) -> None:
    storage, room = Storage(str(tmp_path / "state")), []
    five = RetentionSpec(keep_runs=5)
    for number in range(1, 61):
        night(Ledger(storage), tmp_path, number, window=3)
        (tmp_path / "train" / f"{number - 3}.parquet").unlink(missing_ok=True)
        clean(cleaning(storage, five), quiet)
        room.append({folder: sum(storage.tree(folder).values()) for folder in ("runs", "datasets", "units", "stages")})
    grown = {folder: size - room[9][folder] for folder, size in room[-1].items()}
    assert abs(grown["units"]) < 500 and abs(grown["datasets"]) < 500
    assert grown["runs"] / 50 < 2500 > grown["stages"] / 50  # bytes a night, of small records


def test_the_node_forgets_shards_by_their_content(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    path = tmp_path / "ab" / "abcd.arrow"
    path.parent.mkdir()
    path.write_bytes(b"rows")
    cache.forget({"abcd", "absent"})
    assert not path.exists()
