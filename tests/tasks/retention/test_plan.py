"""What goes and what stays: rules on examples, and as a property: nothing that stays loses anything."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.tasks.retention.plan import RECORD_BYTES, CleanupPlan, Inventory, RunUse, plan_cleanup
from penstock.tasks.retention.spec import RetentionSpec

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
        found |= {f"{folder}/run.json": 900, f"{folder}/attempts/0001.json": 300}
        found |= {f"{folder}/checkpoints/step-1/manifest.json": 90, f"{folder}/checkpoints/step-1/model": 5000}
        found |= {f"stages/{stage}/{key}.json": 100 for stage, key in each.keys.items() if stage != "train"}
    for dataset, made_of in units.items():
        found |= {f"datasets/{dataset}/manifest.json": 700}
        found |= {f"units/{unit}/{name}": 3000 for unit in made_of for name in ("unit.json", "train-00000.arrow")}
    return found


def inventory(runs: list[RunUse], **more: object) -> Inventory:
    units = {f"rows{day}": frozenset({f"u{day}a", "shared"}) for day in range(1, 5)}
    return replace(Inventory(files_of(runs, units), tuple(runs), NOW, units), **more)  # type: ignore[arg-type]


def names(plan: CleanupPlan, *kinds: str) -> set[str]:
    return {each.name for each in plan.deletions if each.kind in kinds}


def test_old_runs_go_with_their_own_rows_and_records_stay() -> None:
    plan = plan_cleanup(inventory([run(day) for day in range(1, 5)]), "p", TWO)
    assert plan.kept == {"r4": "the newest run", "r3": "one of the newest 2"}
    assert names(plan, "run") == {"r1", "r2"}
    assert names(plan, "dataset") == {"rows1", "rows2"}
    assert names(plan, "unit") == {"u1a", "u2a"}  # and not the one that all share
    assert names(plan, "record") == set()
    gone = {path for each in plan.deletions for path in each.paths}
    assert gone & {path for path in gone if path.endswith(("run.json", "0001.json"))} == set()
    assert sum(each.size_bytes for each in plan.deletions) == 2 * (5090 + 700 + 6000)


def test_keep_days_cleans_all_but_the_newest_run() -> None:
    plan = plan_cleanup(inventory([run(1), run(2)]), "p", RetentionSpec(keep_runs=5, keep_days=3))
    assert plan.kept == {"r2": "the newest run"}


def test_held_run_stays_with_its_rows() -> None:
    found = inventory([run(day) for day in range(1, 5)], held={"r1": "its model is m@champion"})
    plan = plan_cleanup(found, "p", TWO)
    assert plan.kept["r1"] == "its model is m@champion"
    assert not names(plan, "dataset", "unit") & {"rows1", "u1a"}


def test_run_at_work_stays_and_is_not_counted_as_newest() -> None:
    found = inventory([run(day) for day in range(1, 5)], at_work={"r4": "a run is at work"})
    assert plan_cleanup(found, "p", TWO).kept == {
        "r4": "a run is at work", "r3": "the newest run", "r2": "one of the newest 2"
    }  # fmt: skip


def test_start_of_a_kept_run_and_trials_of_a_kept_sweep_stay() -> None:
    sweep = run(3, "sweep", sweep="sweep", needs=frozenset({"r1"}))
    trials = [run(2, "trial", sweep="sweep"), run(2, "other", sweep="older")]
    plan = plan_cleanup(inventory([run(1), *trials, sweep, run(4, needs=frozenset({"gone"}))]), "p", TWO)
    assert plan.kept["trial"] == plan.kept["r1"] == "used by sweep"
    assert names(plan, "run") == {"other"}


def test_runs_of_other_pipelines_stay_with_shared_rows() -> None:
    other = run(1, "theirs", pipeline="q", keys={"materialize": "rows1", "train": "train1"})
    plan = plan_cleanup(inventory([run(day) for day in range(1, 5)] + [other]), "p", TWO)
    assert names(plan, "dataset") == {"rows2"} and "theirs" not in names(plan, "run")


def test_rows_in_use_stay_and_old_runs_go() -> None:
    plan = plan_cleanup(inventory([run(day) for day in range(1, 5)], at_work={"x": "run x is at work"}), "p", TWO)
    assert {each.kind for each in plan.deletions} == {"run"} and plan.rows_stay == "run x is at work"


def test_units_of_a_stopped_preparation_stay_until_it_has_ended() -> None:
    stopped = run(9, keys={"read": "read9", "materialize": "rows9"})
    runs = [run(4), stopped]
    files = {"units/u9/unit.json": 10, **files_of(runs, {"rows4": frozenset({"u4a"})})}
    left = {path: size for path, size in files.items() if path != "stages/materialize/rows9.json"}
    found = inventory(runs, units={"rows4": frozenset({"u4a"})})
    assert names(plan_cleanup(replace(found, files=left), "p", TWO), "unit") == set()
    assert names(plan_cleanup(replace(found, files=files), "p", TWO), "unit") == {"u9"}


def test_leftovers_of_a_killed_cleaning_go() -> None:
    runs = [run(1, cleaned=True), run(4)]
    plan = plan_cleanup(inventory(runs), "p", TWO)
    assert [each.why for each in plan.deletions if each.kind == "run"] == ["left by a cleaning that was killed"]
    assert {"rows1", "rows2", "rows3"} == names(plan, "dataset")
    left = {
        path: size for path, size in inventory(runs).files.items() if path not in {p for e in plan.deletions for p in e.paths}
    }
    assert plan_cleanup(inventory(runs, files=left), "p", TWO).deletions == ()


def test_code_of_cleaned_run_stays_up_to_64_kib() -> None:
    found = inventory([run(1), run(2), run(3), run(4)])
    code = {"runs/r1/code/model.py": 10, "runs/r1/code/pipeline.yaml": 10, "runs/r2/code/model.py": RECORD_BYTES + 1}
    plan = plan_cleanup(replace(found, files={**found.files, **code}), "p", TWO)
    assert {path for each in plan.deletions for path in each.paths} & code.keys() == {"runs/r2/code/model.py"}


def test_large_records_of_cleaned_runs_go() -> None:
    found = inventory([run(1, cleaned=True), run(4)])
    large = {
        "stages/read/read1.json": RECORD_BYTES + 1,
        "stages/read/of-none.json": 10,
        "stages/read/read4.json": RECORD_BYTES + 1,
        "stages/materialize/rows1.json": RECORD_BYTES + 1,  # cut when its dataset goes
    }
    large |= {"runs/r1/journal/1.jsonl": RECORD_BYTES, "runs/r1/journal/2.jsonl": 1, "runs/r1/outbox.json": RECORD_BYTES + 1}
    plan = plan_cleanup(replace(found, files={**found.files, **large}), "p", TWO)
    assert names(plan, "record") == {"stages/read/read1.json"}
    gone = {path for each in plan.deletions for path in each.paths}
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
def test_kept_runs_lose_nothing_and_a_second_plan_is_empty(
    runs: list[RunUse], units: dict[str, frozenset[str]], held: dict[str, str], keep_runs: int, keep_days: int
) -> None:
    found = Inventory(files_of(runs, units), tuple(runs), NOW, units, held)
    retention = RetentionSpec(keep_runs=keep_runs, keep_days=keep_days)
    plan = plan_cleanup(found, "p", retention)
    left = {path: size for path, size in found.files.items() if path not in {p for each in plan.deletions for p in each.paths}}
    by_name = {each.run: each for each in runs}
    for name in plan.kept:
        each = by_name[name]
        assert not each.cleaned
        rows = each.keys["materialize"]
        needed = {path for path in found.files if path.startswith(f"runs/{name}/")}
        needed |= {f"datasets/{rows}/manifest.json"} & found.files.keys()
        needed |= {f"units/{unit}/unit.json" for unit in units.get(rows, ())}
        needed |= {f"stages/{stage}/{key}.json" for stage, key in each.keys.items() if stage != "train"}
        assert needed <= left.keys()
        for other in each.needs & by_name.keys():
            assert by_name[other].cleaned or other in plan.kept
    for each in runs:
        assert f"runs/{each.run}/run.json" in left
        if each.pipeline == "q" or each.run in held:
            assert each.cleaned or each.run in plan.kept
    alive = [each for each in runs if each.pipeline == "p" and not each.cleaned and each.sweep in (None, each.run)]
    if alive:
        assert max(alive, key=lambda each: (each.used, each.run)).run in plan.kept
    after = [replace(each, cleaned=each.cleaned or (each.run not in plan.kept and each.pipeline == "p")) for each in runs]
    units_left = {key: of for key, of in units.items() if f"datasets/{key}/manifest.json" in left}
    again = plan_cleanup(replace(found, files=left, runs=tuple(after), units=units_left), "p", retention)
    assert (again.deletions, again.kept) == ((), plan.kept)
