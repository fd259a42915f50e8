"""What a plan says of a project that was never run; the plans of real runs are looked at where those runs are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.errors import PreflightError, ResumeError, SpecError
from penstock.flows.cli import app
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import describe_workers, format_workers, plan_pipeline
from penstock.ingest.manifest import STREAMS, DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.tasks import prepare as tasks_prepare
from penstock.tasks.context import StageOutcome
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger, StageRecord, utc_now
from penstock.tasks.shuffle import STAGE as SHUFFLE
from penstock.tasks.shuffle import train_order
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.store import CheckpointStore, SavedBytes, Snapshot
from tests.drills.project import make_project
from tests.ingest.preparing import Source

PREPARED = DatasetManifest(key="k", feed_schema=FeedSchema(columns=()), rows={"train": 1442}, content_digest="c")


def test_plan_of_refused_run_fails_with_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = make_project(tmp_path / "p", files=1, epochs=1)
    for override, kind, says in (
        ("train.workers=64", PreflightError, "train.workers: 64"),
        ("preprocess=[{drop: [nothing]}]", SpecError, "no column 'nothing'"),
    ):
        with pytest.raises(kind, match=r"(?s)" + says) as refused:
            plan_pipeline(load_spec(file, [override]))
        assert [stage["action"] for stage in refused.value.result["stages"]] == ["run"] * 7
    with monkeypatch.context() as unwritable, pytest.raises(PreflightError, match="cannot be written: ") as refused:
        unwritable.setattr("penstock.flows.preflight.checks.os.access", lambda _path, _mode: False)
        plan_pipeline(load_spec(file))
    assert len(refused.value.result["stages"]) == 7
    assert not (file.parent / ".penstock").exists(), "a plan writes nothing"

    loaded = load_spec(file)
    project, ledger = loaded.project, Ledger(Storage(loaded.spec.storage))
    begun = ledger.new_run("drill", loaded.spec.model_dump(mode="json", by_alias=True))
    begun = begun.model_copy(update={"keys": stage_keys(project, ledger.stage_output), "status": "interrupted"})
    facts = CheckpointFacts(step=3, epoch=0, position=192, world_size=1)
    CheckpointStore(ledger.run_storage(begun.run)).write(Snapshot(facts, {"weights.txt": SavedBytes(b"1")}, str))
    ledger.save_run(begun)
    ledger.make_current(begun)
    with pytest.raises(ResumeError, match="is not finished, and it cannot continue") as forbidden:
        plan_pipeline(load_spec(file, ["train.batch_rows=32"]))
    assert forbidden.value.problems == ("shuffle.lanes of batch_rows: 64 -> 32", "train.batch_rows: 64 -> 32")
    with pytest.raises(PreflightError, match=r"train\.cpus_per_worker: 64 needs 128"):  # as `run`, also of a run that has begun
        plan_pipeline(load_spec(file, ["train.cpus_per_worker=64", "train.workers=2"]))
    assert forbidden.value.next_step.endswith(f"penstock run {file} --set train.batch_rows=32 --fresh")
    told = CliRunner().invoke(app, ["plan", str(file), "--set", "train.batch_rows=32"])
    assert told.exit_code == 6 and told.stdout.startswith(f"refuse: {begun.run}\n")
    ledger.storage.write_bytes("pipelines/drill/current.json", b"{")
    told = CliRunner().invoke(app, ["plan", str(file), "--set", "train.retries=2"])
    assert f"or begin a new run: penstock run {file} --set train.retries=2 --fresh" in told.stderr, "not FILE"


@pytest.mark.parametrize("damage", ["other bytes", "gone", "none"])
def test_damaged_prepared_rows_are_planned_to_run(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_project(tmp_path / "p", files=1)
    loaded = load_spec(file)
    project, ledger = loaded.project, Ledger(Storage(loaded.spec.storage))
    source = Source(file.parent, loaded.spec.data, list(loaded.spec.preprocess))
    manifest = source.materialize(project.storage)
    order = train_order(project.spec.shuffle, manifest, project.spec.train.batch_rows)
    for stage, output in (
        ("read", source.snapshot().model_dump(mode="json")),
        ("preprocess", source.fit().model_dump(mode="json")),
        ("materialize", manifest.model_dump(mode="json")),
        ("shuffle", {"order": order.model_dump(mode="json"), "fingerprint": order.fingerprint}),
    ):
        key = stage_keys(project, ledger.stage_output)[stage].key
        record = StageRecord(stage=stage, key=key, inputs={}, output=output, seconds=0, made=utc_now())
        ledger.save_stage(f"stages/{stage}/{key}.json", record)
    shard = project.storage.local_path(manifest.shards[0].path)
    if damage == "other bytes":
        held = bytearray(shard.read_bytes())
        held[len(held) // 2] ^= 1
        shard.write_bytes(held)
    elif damage == "gone":
        shard.unlink()
    planned = {stage["name"]: stage for stage in plan_pipeline(load_spec(file))["stages"]}
    assert planned["materialize"]["action"] == ("reuse" if damage == "none" else "run")
    if damage != "none":
        assert planned["materialize"]["because"][0].startswith("1 of its shards are missing or damaged")
    # In a store only sizes are compared, and once: a look at a million shards takes seconds.
    looks: list[bool] = []
    real = tasks_prepare.damaged_shards
    monkeypatch.setattr(tasks_prepare, "damaged_shards", lambda *args, **how: looks.append(how["deep"]) or real(*args, **how))
    remote = {
        stage["name"]: stage for stage in plan_pipeline(load_spec(file, [f"storage=local://{project.storage.root}"]))["stages"]
    }
    assert remote["materialize"]["action"] == ("run" if damage == "gone" else "reuse") and looks == [False]


def test_line_of_shuffle_has_mode_seed_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = train_order(load_spec(make_project(tmp_path / "p", files=1)).spec.shuffle, PREPARED, 64)
    output = {"order": order.model_dump(mode="json"), "fingerprint": order.fingerprint}
    facts = SHUFFLE.facts(output)
    ConsoleReporter().finished(StageOutcome("shuffle", "k", "ran", 0.0, output, facts))
    assert capsys.readouterr().err == "+ shuffle      ran         0.0 s   mode global  seed 5  rows 1,442\n"
    assert dict(facts)["fingerprint"] == order.fingerprint


def test_plan_states_lanes_and_needs_of_a_worker(tmp_path: Path) -> None:
    loaded = load_spec(make_project(tmp_path / "p", files=1), ["train.batch_rows=64", "train.workers=4"])
    shards = [
        ShardInfo(path=f"units/u/{n}", split="train", rows=1000, size_bytes=10**6, digest=f"{n:032x}", unit="u")
        for n in range(40)
    ]
    manifest = PREPARED.model_copy(update={"table": ShardTable.of(shards), "rows": {"train": 40_000}})
    manifest.write(loaded.project.storage)
    workers = describe_workers(loaded.project, manifest.model_dump())
    assert workers is not None
    assert 0.5 < workers["chi2_by_freedom"] < 1.1
    assert {name: workers[name] for name in ("lanes", "shards", "workers", "rows")} == {
        "lanes": 32, "shards": 40, "workers": 4, "rows": 10_000,
    }  # fmt: skip
    assert 10e6 <= workers["fetch_bytes"] == workers["disk_bytes"] <= 12e6
    assert format_workers({**workers, "chi2_by_freedom": 0.97}) == (
        "32 lanes of 40 shards; each of 4 workers reads at most 10,000 rows an epoch from "
        f"{workers['fetch_bytes'] / 1e6:.1f} MB, {workers['disk_bytes'] / 1e6:.1f} MB of them at once; "
        "sorted rows mix with chi2/df 0.97 (a full shuffle: 1)"
    )
    one = describe_workers(load_spec(loaded.file, ["shuffle.lanes=1", "train.workers=4"]).project, manifest.model_dump())
    assert one is not None and (one["lanes"], one["fetch_bytes"]) == (1, 40e6)
    assert describe_workers(load_spec(loaded.file, ["shuffle.lanes=1"]).project, manifest.model_dump()) is None
    in_windows = ["shuffle.lanes=1", "shuffle.mode=windowed", "shuffle.window_rows=1000", "shuffle.window_of=shards"]
    windowed = describe_workers(load_spec(loaded.file, in_windows).project, manifest.model_dump())
    assert windowed is not None and windowed["chi2_by_freedom"] > 9, "a window of one shard, of sorted rows, mixes badly"


def test_plan_states_lanes_of_a_stream(tmp_path: Path) -> None:
    stream = ["materialize.cache=none", "shuffle.mode=windowed", "shuffle.window_rows=4000", "train.batch_rows=64"]
    loaded = load_spec(make_project(tmp_path / "p", files=1), [*stream, "train.workers=4"])
    units = [[number, number + 1, 0, 0, 250, 10**8] for number in range(160)]
    manifest = PREPARED.model_copy(update={"rows": {"train": 40_000}, "extra": {STREAMS: {"train": units}}})
    workers = describe_workers(loaded.project, manifest.model_dump())
    assert workers is not None
    assert 1 < workers["chi2_by_freedom"] < 10 and 4e9 <= workers["fetch_bytes"] <= 4.4e9
    fetched = f"{workers['fetch_bytes'] / 1e6:,.1f} MB"
    assert format_workers({**workers, "chi2_by_freedom": 4.5}) == (
        f"16 lanes of 160 units; each of 4 workers prepares at most 10,000 rows an epoch from {fetched}, "
        "800.0 MB of them at once; sorted rows mix with chi2/df 4.5 (a full shuffle: 1)"
    )
    one = load_spec(loaded.file, [*stream, "shuffle.lanes=1"]).project
    assert describe_workers(one, manifest.model_dump()) is None
