"""What goes and what stays: rules on examples, and for any storage that can be, that nothing which stays loses anything."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tasks.room.plan import RECORD_BYTES, Holdings, RoomPlan, RunUse, plan_room
from penstock.tasks.room.spec import RetentionSpec

NOW = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
TWO = RetentionSpec(keep_runs=2, keep_days=30)


def run(day: int, name: str = "", **more: object) -> RunUse:
    """A run of pipeline `p` on that day of January and the days after it, with rows of its own."""
    name = name or f"r{day}"
    keys = {"read": f"read{day}", "materialize": f"rows{day}", "train": f"train{day}"}
    return replace(RunUse(name, "p", dt.datetime(2026, 2, 1, tzinfo=dt.UTC) + dt.timedelta(days=day), keys=keys), **more)  # type: ignore[arg-type]


def files_of(runs: list[RunUse], units: dict[str, frozenset[str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in runs:
        folder = f"runs/{each.run}"
        found |= {f"{folder}/run.json": 900, f"{folder}/attempts/0001.json": 300, f"{folder}/code.json": 200}
        found |= {f"{folder}/checkpoints/step-1/manifest.json": 90, f"{folder}/checkpoints/step-1/model": 5000}
        found |= {f"stages/{stage}/{key}.json": 100 for stage, key in each.keys.items() if stage != "train"}
        if each.keys:
            found |= {f"pipelines/{each.pipeline}/trainings/{each.keys['train']}.json": 40}
    for dataset, made_of in units.items():
        found |= {f"datasets/{dataset}/manifest.json": 700}
        found |= {f"units/{unit}/{name}": 3000 for unit in made_of for name in ("unit.json", "train-00000.arrow")}
    return found


def holdings(runs: list[RunUse], **more: object) -> Holdings:
    units = {f"rows{day}": frozenset({f"u{day}a", "shared"}) for day in range(1, 5)}
    return replace(Holdings(files_of(runs, units), tuple(runs), NOW, units), **more)  # type: ignore[arg-type]


def names(plan: RoomPlan, *kinds: str) -> set[str]:
    return {each.name for each in plan.going if each.kind in kinds}


def test_old_runs_go_with_rows_that_no_other_run_has_and_records_stay() -> None:
    plan = plan_room(holdings([run(day) for day in range(1, 5)]), "p", TWO)
    assert plan.kept == {"r4": "the newest run", "r3": "one of the newest 2"}
    assert names(plan, "run") == {"r1", "r2"}
    assert names(plan, "dataset") == {"rows1", "rows2"}
    assert names(plan, "unit") == {"u1a", "u2a"}  # and not the one that all share
    assert names(plan, "record") == {"pipelines/p/trainings/train1.json", "pipelines/p/trainings/train2.json"}
    gone = {path for each in plan.going for path in each.paths}
    assert gone & {path for path in gone if path.endswith(("run.json", "code.json", "0001.json"))} == set()
    assert plan.size_bytes == 2 * (5090 + 700 + 6000 + 40)


def test_days_let_even_the_newest_runs_go_but_for_the_last() -> None:
    plan = plan_room(holdings([run(1), run(2)]), "p", RetentionSpec(keep_runs=5, keep_days=3))
    assert plan.kept == {"r2": "the newest run"}


@pytest.mark.parametrize(
    ("more", "stays"),
    [
        ({"held": {"r1": "its model is m@champion"}}, "its model is m@champion"),
        ({"busy": {"p": "a sweep is at work"}}, "a sweep is at work"),
    ],
)
def test_what_is_held_or_worked_on_stays_with_its_rows(more: dict[str, object], stays: str) -> None:
    plan = plan_room(holdings([run(day) for day in range(1, 5)], **more), "p", TWO)
    assert plan.kept["r1"] == stays
    assert not names(plan, "dataset", "unit") & {"rows1", "u1a"}


def test_a_run_at_work_stays_and_takes_no_place_of_one_that_ended() -> None:
    found = holdings([run(day) for day in range(1, 5)], at_work={"r4": "a run is at work"})
    assert plan_room(found, "p", TWO).kept == {
        "r4": "a run is at work", "r3": "the newest run", "r2": "one of the newest 2"
    }  # fmt: skip


def test_a_run_stays_that_a_kept_run_began_with_and_the_trials_of_a_kept_sweep() -> None:
    sweep = run(3, "sweep", sweep="sweep", needs=frozenset({"r1"}))
    trials = [run(2, "trial", sweep="sweep"), run(2, "other", sweep="older")]
    plan = plan_room(holdings([run(1), *trials, sweep, run(4, needs=frozenset({"gone"}))]), "p", TWO)
    assert plan.kept["trial"] == plan.kept["r1"] == "used by sweep"
    assert names(plan, "run") == {"other"}


def test_other_pipelines_keep_their_runs_and_what_they_share() -> None:
    other = run(1, "theirs", pipeline="q", keys={"materialize": "rows1", "train": "train1"})
    plan = plan_room(holdings([run(day) for day in range(1, 5)] + [other]), "p", TWO)
    assert names(plan, "dataset") == {"rows2"} and "theirs" not in names(plan, "run")


def test_while_a_sweep_is_at_work_no_prepared_rows_go() -> None:
    plan = plan_room(holdings([run(day) for day in range(1, 5)], sweeping=True), "p", TWO)
    assert {each.kind for each in plan.going} == {"run"}
    assert all(
        plan.uses(each) == (each.kind != "run") for each in plan_room(holdings([run(1), run(2), run(3)]), "p", TWO).going
    )


def test_what_a_killed_cleaning_left_goes_and_a_cleaned_run_holds_nothing() -> None:
    runs = [run(1, cleaned=True), run(4)]
    plan = plan_room(holdings(runs), "p", TWO)
    assert [each.why for each in plan.going if each.kind == "run"] == ["left by a cleaning that was killed"]
    assert {"rows1", "rows2", "rows3"} == names(plan, "dataset")
    left = {path: size for path, size in holdings(runs).files.items() if path not in {p for e in plan.going for p in e.paths}}
    assert plan_room(holdings(runs, files=left), "p", TWO).going == ()


def test_a_record_that_is_large_goes_with_its_run_and_one_of_no_run_goes_too() -> None:
    found = holdings([run(1, cleaned=True), run(4)])
    large = {
        "stages/read/read1.json": RECORD_BYTES + 1,
        "stages/read/of-none.json": 10,
        "stages/read/read4.json": RECORD_BYTES + 1,
    }
    large |= {"runs/r1/journal/1.jsonl": RECORD_BYTES, "runs/r1/journal/2.jsonl": 1, "runs/r1/outbox.json": RECORD_BYTES + 1}
    plan = plan_room(replace(found, files={**found.files, **large}), "p", TWO)
    assert {"stages/read/read1.json", "stages/read/of-none.json"} <= names(plan, "record")
    assert "stages/read/read4.json" not in names(plan, "record")
    gone = {path for each in plan.going for path in each.paths}
    assert {"runs/r1/journal/1.jsonl", "runs/r1/journal/2.jsonl"} <= gone and "runs/r1/outbox.json" not in gone


RUNS = st.builds(
    RunUse,
    run=st.sampled_from([f"r{number}" for number in range(8)]),
    pipeline=st.sampled_from(["p", "p", "p", "q"]),
    used=st.integers(0, 60).map(lambda day: NOW - dt.timedelta(days=day)),
    sweep=st.sampled_from([None, None, "r0", "r1"]),
    keys=st.dictionaries(st.sampled_from(["read", "materialize", "train"]), st.sampled_from(["k1", "k2", "k3"]), min_size=3),
    needs=st.frozensets(st.sampled_from(["r0", "r1", "r2", "absent"]), max_size=2),
    cleaned=st.booleans(),
)
UNITS = st.dictionaries(
    st.sampled_from(["k1", "k2", "k3", "k4"]), st.frozensets(st.sampled_from(["u1", "u2", "u3", "u4"]), max_size=3)
)


@given(
    st.lists(RUNS, unique_by=lambda each: each.run),
    UNITS,
    st.dictionaries(st.sampled_from(["r3", "r4"]), st.just("held"), max_size=1),
    st.integers(1, 4),
    st.integers(1, 60),
)
def test_nothing_that_stays_loses_anything_and_a_second_cleaning_finds_nothing(
    runs: list[RunUse], units: dict[str, frozenset[str]], held: dict[str, str], keep_runs: int, keep_days: int
) -> None:
    found = Holdings(files_of(runs, units), tuple(runs), NOW, units, held)
    retention = RetentionSpec(keep_runs=keep_runs, keep_days=keep_days)
    plan = plan_room(found, "p", retention)
    left = {path: size for path, size in found.files.items() if path not in {p for each in plan.going for p in each.paths}}
    by_name = {each.run: each for each in runs}
    for name in plan.kept:
        each = by_name[name]
        assert not each.cleaned
        rows = each.keys["materialize"]
        needed = {path for path in found.files if path.startswith(f"runs/{name}/")}
        needed |= {f"datasets/{rows}/manifest.json"} & found.files.keys()
        needed |= {f"units/{unit}/unit.json" for unit in units.get(rows, ())}
        needed |= {f"stages/{stage}/{key}.json" for stage, key in each.keys.items() if stage != "train"}
        assert needed <= left.keys() and not needed & set(plan.shrinking)
        for other in each.needs & by_name.keys():
            assert by_name[other].cleaned or other in plan.kept
    assert set(plan.shrinking) <= left.keys() and not any(path.startswith(("units/", "datasets/")) for path in plan.shrinking)
    for each in runs:
        assert f"runs/{each.run}/run.json" in left
        goes = each.pipeline == "p" and not each.cleaned and each.run not in plan.kept
        assert (f"runs/{each.run}/run.json" in plan.shrinking) == goes
        if each.pipeline == "q" or each.run in held:
            assert each.cleaned or each.run in plan.kept
    alive = [each for each in runs if each.pipeline == "p" and not each.cleaned and each.sweep in (None, each.run)]
    if alive:
        assert max(alive, key=lambda each: (each.used, each.run)).run in plan.kept
    after = [replace(each, cleaned=each.cleaned or (each.run not in plan.kept and each.pipeline == "p")) for each in runs]
    units_left = {key: of for key, of in units.items() if f"datasets/{key}/manifest.json" in left}
    again = plan_room(replace(found, files=left, runs=tuple(after), units=units_left), "p", retention)
    assert (again.going, again.kept, again.shrinking) == ((), plan.kept, ())
    assert not any(plan.uses(each) for each in plan.going)
