"""Deleting: what stays is whole, a kill at any moment leaves nothing half, and a run that begins loses nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import lease as lease_module
from penstock.errors import LeaseHeldError, ResumeError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import damaged_shards
from penstock.lease import current_holder, hold_lease
from penstock.storage import Storage
from penstock.tasks.records.at_work import CLEANUP_LEASE, choosing_a_run
from penstock.tasks.records.ledger import Ledger, StageRecord, lease_path, run_leases, sweep_lease_path
from penstock.tasks.retention.clean import Cleaning
from penstock.tasks.retention.plan import CleanupPlan, Deletion
from penstock.tasks.retention.spec import RetentionSpec
from tests import ROOT
from tests.penstock.test_lease import left_abroad
from tests.tasks.retention.recorded_nights import begin, night, nights, prepare, source_of, use_rows

ONE = RetentionSpec(keep_runs=1)


def cleaning(storage: Storage, retention: RetentionSpec = ONE) -> Cleaning:
    return Cleaning(Ledger(storage), "p", retention, {}, "penstock clean of ann")


def quiet(_plan: CleanupPlan) -> None:
    """Announce nothing."""


def refuse_to_wait(line: str) -> None:
    raise AssertionError(line)


def freed(
    storage: Storage, announce: Callable[[CleanupPlan], None] = quiet, retention: RetentionSpec = ONE
) -> tuple[Deletion, ...]:
    return cleaning(storage, retention).clean(announce, refuse_to_wait).deletions


def layout(storage: Storage) -> set[str]:
    """Files of runs and rows, without leases."""
    return {path for folder in ("runs", "datasets", "units", "stages", "profiles") for path in storage.tree(folder)}


def check_only_kept(storage: Storage, kept: DatasetManifest) -> None:
    """That only the last run's data are there, and that they are whole."""
    assert damaged_shards(storage, kept, deep=True) == []
    files = layout(storage)
    assert {path.split("/")[1] for path in files if path.startswith("units/")} == {*kept.shards.units}
    assert {path.split("/")[1] for path in files if path.startswith("datasets/")} == {kept.key}
    assert {path.split("/")[1] for path in files if "/checkpoints/" in path} == {kept.key.replace("materialize-", "r0")}


@pytest.fixture(params=["on a disk", "in a store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "state") if request.param == "on a disk" else request.getfixturevalue("s3_bucket") + "/state")


def test_clean_announces_then_deletes_and_marks_records(storage: Storage, tmp_path: Path) -> None:
    made = nights(storage, tmp_path, 3)
    before = layout(storage)
    announced: list[CleanupPlan] = []

    def announce(plan: CleanupPlan) -> None:
        announced.append(plan)
        assert layout(storage) == before

    gone = freed(storage, announce)
    assert [plan.deletions for plan in announced] == [gone]
    assert {each.name for each in gone if each.kind == "run"} == {"r01", "r02"}
    check_only_kept(storage, made[-1])
    ledger = Ledger(storage)
    assert [str(run.cleaned) if run.cleaned else None for run in ledger.runs()][1:] == [
        f"cleaned on {dt.datetime.now(dt.UTC).date()} by penstock clean of ann",
        None,
    ]
    assert ledger.attempts("r01")
    # Rows by split and digests stay readable; nothing is reused.
    path = "stages/materialize/materialize-1.json"
    assert ledger.stage_record(path, "materialize-1") is None
    record = ledger.stage_record(path, "materialize-1", cleaned=True)
    assert record is not None and DatasetManifest.model_validate(record.output).rows == made[0].rows
    assert ledger.run_with_training("p", "train-1") is None and ledger.run_with_training("p", "train-3") is not None
    assert freed(storage) == ()


def test_copied_sources_of_no_kept_run_go(storage: Storage, tmp_path: Path) -> None:
    ledger = Ledger(storage)
    nights(storage, tmp_path, 4)
    for name in ("old", "new", "both", "given", "begins"):
        storage.write_bytes(f"sources/copy-{name}/made/part-00000.arrow", bytes(1000))
        storage.write_json(f"sources/copy-{name}/done.json", {"version": 1})
    for number, names in ((1, ["old", "both"]), (2, ["old"]), (4, ["new", "both"])):
        output = {"files": {"uri": [storage.uri(f"sources/copy-{name}/made/part-00000.arrow") for name in names]}}
        record = StageRecord(stage="read", key=f"read-{number}", inputs={}, output=output, seconds=0, made="2026")
        ledger.save_stage(f"stages/read/read-{number}.json", record)
    for name in ("r03", "r04"):
        run = ledger.load_run(name)
        assert run is not None
        where = storage.uri(f"sources/copy-{'old' if name == 'r03' else 'given'}/made")
        ledger.save_run(run.model_copy(update={"spec": {**run.spec, "data": {"train": where}}}))
    assert {each.name for each in freed(storage) if each.kind == "source"} == {"copy-old"}
    assert {*storage.list("sources")} == {"copy-new", "copy-both", "copy-given", "copy-begins"}
    assert freed(storage) == ()


def test_run_that_goes_back_prepares_cleaned_rows_again(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    first, _ = nights(storage, tmp_path, 2)
    freed(storage)
    (tmp_path / "train" / "1.parquet").unlink()
    again = use_rows(Ledger(storage), begin(Ledger(storage), "r09", "1", day=9), source_of(tmp_path, 1))
    assert again.content_digest == first.content_digest and damaged_shards(storage, again, deep=True) == []


def test_unreadable_run_record_stops_clean_before_a_deletion(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    nights(storage, tmp_path, 2)
    storage.write_bytes("runs/r01/run.json", b'{"version": 9}')
    before = layout(storage)
    with pytest.raises(ResumeError, match="record of run r01 cannot be read"):
        freed(storage)
    assert layout(storage) == before


@pytest.mark.parametrize("damage", ["table is gone", "manifest is cut"])
def test_rows_of_kept_dataset_with_damaged_manifest_stay(tmp_path: Path, damage: str) -> None:
    storage = Storage(str(tmp_path / "state"))
    kept = nights(storage, tmp_path, 2)[-1]
    if damage == "table is gone":
        storage.delete(f"datasets/{kept.key}/shards-{kept.table.digest}.arrow")
    else:
        storage.write_bytes(f"datasets/{kept.key}/manifest.json", b"{")
    plan = cleaning(storage).clean(quiet, refuse_to_wait)
    assert {each.kind for each in plan.deletions} == {"run"}
    assert kept.key in plan.rows_stay and "`penstock run` makes it again" in plan.rows_stay
    assert all(storage.exists(shard.path) for shard in kept.shards)
    prepare(source_of(tmp_path, 2), storage, kept.key)
    freed(storage)
    check_only_kept(storage, kept)


# Processes at work.

OWN_RUN, OTHER_RUN = f"{run_leases('p')}/r01", f"{run_leases('q')}/x"


@pytest.mark.parametrize(("lease", "runs"), [(OWN_RUN, set()), (OTHER_RUN, {"r01"}), (sweep_lease_path("q"), {"r01"})])
def test_clean_beside_a_process_at_work_deletes_old_runs_only(tmp_path: Path, lease: str, runs: set[str]) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    prepare(source_of(tmp_path, 1), storage, "of-no-run")
    with hold_lease(storage, lease):
        announced: list[CleanupPlan] = []
        assert {(each.kind, each.name) for each in freed(storage, announced.append)} == {("run", name) for name in runs}
        assert "is at work" in announced[0].rows_stay
    assert {each.kind for each in freed(storage)} >= {"dataset", "unit"}


def test_clean_is_refused_beside_a_sweep_of_the_pipeline(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    with hold_lease(storage, sweep_lease_path("p")), pytest.raises(LeaseHeldError, match="a sweep of pipeline 'p' is at work"):
        freed(storage)


@pytest.mark.parametrize("pipeline", ["p", "q"])
def test_clean_is_refused_while_a_run_begins(tmp_path: Path, pipeline: str) -> None:
    """Weights that it begins with (`start_from`) are on no record yet."""
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    before = layout(storage)
    with choosing_a_run(storage, pipeline):
        with pytest.raises(LeaseHeldError, match=f"a run of pipeline '{pipeline}' begins or is repaired"):
            freed(storage)
        assert layout(storage) == before
        run = begin(Ledger(storage), "theirs", "9", pipeline=pipeline)
        spec = {"name": pipeline, "train": {"start_from": "run:r01"}}
        Ledger(storage).save_run(run.model_copy(update={"spec": spec}))
    assert "r01" not in {each.name for each in freed(storage)}
    assert storage.exists("runs/r01/checkpoints/step-1/model.safetensors")


def test_run_begins_only_when_a_cleaning_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "SILENCE_S", 0.0)
    storage, waits, chosen = Storage(str(tmp_path / "state")), threading.Event(), threading.Event()
    nights(storage, tmp_path, 2)

    def choose() -> None:
        with choosing_a_run(storage, "new", on_wait=lambda _holder: waits.set()):
            chosen.set()

    run = threading.Thread(target=choose)

    def announce(_plan: CleanupPlan) -> None:
        run.start()
        assert waits.wait(60) and not chosen.is_set()

    freed(storage, announce)
    run.join(60)
    assert chosen.is_set()


@pytest.mark.parametrize(("status", "goes"), [("done", {"r01"}), ("running", set())])
def test_done_run_that_still_cleans_up_is_the_newest(tmp_path: Path, status: Any, goes: set[str]) -> None:
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    ledger = Ledger(storage)
    newest = ledger.current_run("p")
    assert newest is not None and newest.run == "r02"
    ledger.save_run(newest.model_copy(update={"status": status}))
    with hold_lease(storage, f"{run_leases('p')}/r02"):
        assert {each.name for each in freed(storage) if each.kind == "run"} == goes


def test_dead_holders_elsewhere_are_watched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "WATCH_S", 1.0)
    storage = Storage(str(tmp_path / "state"))
    nights(storage, tmp_path, 2)
    runs = [f"{run_leases(pipeline)}/lost-{number}" for pipeline in "pqr" for number in range(4)]
    for path in (*runs, *map(sweep_lease_path, "pqr"), *map(lease_path, "qr")):
        left_abroad(storage, 3600, path)
    began = time.monotonic()
    assert {each.name for each in freed(storage) if each.kind == "run"} == {"r01"}
    assert time.monotonic() - began < 8, "17 leases, a second each if one is watched after the other"


def test_second_cleaning_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "SILENCE_S", 0.0)
    storage, waits = Storage(str(tmp_path / "state")), threading.Event()
    kept = nights(storage, tmp_path, 2)[-1]
    second = threading.Thread(target=cleaning(storage).clean, args=[quiet, lambda _holder: waits.set()])

    def announce(_plan: CleanupPlan) -> None:
        second.start()
        assert waits.wait(60)

    freed(storage, announce)
    second.join(60)
    check_only_kept(storage, kept)


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
            cleaning(Dying(storage.root)).clean(quiet, refuse_to_wait)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_killed_at_any_change_the_next_cleaning_completes_it(tmp_path: Path) -> None:
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
        check_only_kept(storage, kept)
    assert moments > 10
    check_only_kept(storage, kept)


CLEANER = """
import sys
from pathlib import Path
from penstock.storage import Storage
from penstock.errors import LeaseHeldError
from tests.tasks.retention.test_clean import cleaning, quiet
print("begins", flush=True)
while not Path(sys.argv[2]).exists():
    try:
        cleaning(Storage(sys.argv[1])).clean(quiet, lambda line: None)
    except LeaseHeldError as error:
        assert "begins" in error.message
"""


@contextlib.contextmanager
def cleaning_again_and_again(storage: Storage, stop: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CLEANER, storage.root, str(stop)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        try:
            yield process
        finally:
            stop.touch()
    assert process.returncode == 0


def test_runs_beside_repeated_cleanings_keep_their_rows(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "state"))
    kept = nights(storage, tmp_path, 1)[0]
    ledger = Ledger(storage)
    sources = {key: source_of(tmp_path / key, 2 + number) for number, key in enumerate(("a", "b"))}
    with cleaning_again_and_again(storage, tmp_path / "stop"):
        for number in range(12):
            key = ("a", "b")[number // 2 % 2]
            with contextlib.ExitStack() as held:
                with choosing_a_run(storage, "q"):
                    run = begin(ledger, f"q{number}", key, pipeline="q")
                    held.enter_context(hold_lease(storage, f"{run_leases('q')}/q{number}"))
                manifest = use_rows(ledger, run, sources[key])
                for _ in range(3):
                    assert damaged_shards(storage, manifest, deep=True) == []
                storage.delete(f"runs/{run.run}")  # nothing refers to its rows any more
    assert current_holder(storage, CLEANUP_LEASE) is None
    assert damaged_shards(storage, kept, deep=True) == []
    freed(storage)
    assert storage.list("datasets") == ["materialize-1"]


@pytest.mark.drill
def test_sixty_nights_take_the_disk_of_ten_but_for_records(tmp_path: Path) -> None:
    storage, sizes = Storage(str(tmp_path / "state")), []
    five = RetentionSpec(keep_runs=5)
    for number in range(1, 61):
        night(Ledger(storage), tmp_path, number, window=3)
        (tmp_path / "train" / f"{number - 3}.parquet").unlink(missing_ok=True)
        freed(storage, retention=five)
        sizes.append({folder: sum(storage.tree(folder).values()) for folder in ("runs", "datasets", "units", "stages")})
    grown = {folder: size - sizes[9][folder] for folder, size in sizes[-1].items()}
    assert abs(grown["units"]) < 500 and abs(grown["datasets"]) < 500
    assert grown["runs"] / 50 < 2500 > grown["stages"] / 50  # bytes a night, of small records
