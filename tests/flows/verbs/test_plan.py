"""What a plan says of a project that was never run; the plans of real runs are looked at where those runs are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.errors import PreflightError, ResumeError, SpecError
from penstock.flows.answer import LineConsole
from penstock.flows.cli import app
from penstock.flows.run.reporter import PlainReporter
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import describe_mixing, describe_workers, format_workers, plan_pipeline, show_plan
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
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
WINDOWED = ["shuffle.mode=windowed", "shuffle.window_rows=3200", "train.batch_rows=64"]


@pytest.mark.parametrize(
    ("more", "like_rows"),
    [
        ([], pytest.approx(21.4, abs=1)),  # 64 rows out of 32 runs
        (["shuffle.window_of=shards"], pytest.approx(1, abs=0.1)),
        (["materialize.cache=none"], pytest.approx(1, abs=0.1)),
    ],
)
def test_plan_describes_mixing_of_windows(tmp_path: Path, more: list[str], like_rows: float) -> None:
    plan = plan_pipeline(load_spec(make_project(tmp_path / "p", files=1), [*WINDOWED, *more]))
    (shuffle,) = [stage for stage in plan["stages"] if stage["name"] == "shuffle"]
    assert shuffle["mixing"] == {"batch_rows": 64, "like_rows": like_rows, "rows_known": False}
    said = io.StringIO()
    show_plan(plan, LineConsole(file=said, width=120))
    expected = f"a batch of 64 out of a window is worth at least about {shuffle['mixing']['like_rows']:.0f} rows"
    assert expected in said.getvalue()


def test_plan_of_refused_run_fails_with_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = make_project(tmp_path / "p", files=1, epochs=1)
    for override, kind, says in (
        ("train.workers=64", PreflightError, "64 workers"),
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
    assert forbidden.value.problems == ("shuffle.lanes_at_most: 64 -> 32", "train.batch_rows: 64 -> 32")
    with pytest.raises(PreflightError, match="128 CPUs; this machine has"):  # as `run`, also of a run that has begun
        plan_pipeline(load_spec(file, ["train.cpus_per_worker=64", "train.workers=2"]))
    assert forbidden.value.next_step.endswith(f"penstock run {file} --set train.batch_rows=32 --fresh")
    told = CliRunner().invoke(app, ["plan", str(file), "--set", "train.batch_rows=32"])
    assert told.exit_code == 6 and told.stdout.startswith(f"refuse: {begun.run}\n")
    ledger.storage.write_bytes("pipelines/drill/current.json", b"{")
    told = CliRunner().invoke(app, ["plan", str(file), "--set", "train.retries=2"])
    assert f"or begin a new run: penstock run {file} --set train.retries=2 --fresh" in told.stderr, "not FILE"


@pytest.mark.parametrize("damage", ["other bytes", "gone", "none"])
def test_damaged_prepared_rows_are_planned_to_run(tmp_path: Path, damage: str) -> None:
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


def test_full_shuffle_has_no_mixing_line(tmp_path: Path) -> None:
    plan = plan_pipeline(load_spec(make_project(tmp_path / "p", files=1)))
    assert [stage["action"] for stage in plan["stages"]] == ["run"] * 7
    assert [stage["mixing"] for stage in plan["stages"] if "mixing" in stage] == [None]


def test_plan_shows_mixing_as_line_and_as_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = train_order(load_spec(make_project(tmp_path / "p", files=1)).spec.shuffle, PREPARED, 64)
    output = {"order": order.model_dump(mode="json"), "fingerprint": order.fingerprint}
    facts = SHUFFLE.facts(output)
    PlainReporter().finished(StageOutcome("shuffle", "k", "ran", 0.0, output, facts))
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


def test_window_of_all_rows_mixes_fully(tmp_path: Path) -> None:
    loaded = load_spec(make_project(tmp_path / "p", files=1), WINDOWED)
    mixing = describe_mixing(loaded.project, PREPARED.model_dump())
    assert mixing == {"batch_rows": 64, "like_rows": 64, "rows_known": True}
