"""Which files share a unit: bounded sizes, and an added file moves only what is next to it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.unit_plan import CAP, plan_units
from penstock.ingest.schema import SPLITS

UNIT = 1000


def file(name: str, size: int, location: str = "train") -> SourceFile:
    return SourceFile.model_validate(
        {"uri": f"/x/{location}/{name}", "name": name, "location": location, "size_bytes": size, "fingerprint": "1"}
    )


names = st.text("abcdefgh0123456789", min_size=1, max_size=8)
files = st.builds(file, names, st.integers(1, 3 * UNIT), st.sampled_from(SPLITS))
sources = st.lists(files, max_size=60, unique_by=lambda f: (f.location, f.name))


def flat(units: Sequence[Sequence[SourceFile]]) -> list[SourceFile]:
    return [f for unit in units for f in unit]


@given(sources)
def test_each_file_is_in_one_unit_of_its_location(source: list[SourceFile]) -> None:
    units = plan_units(source, UNIT)
    assert flat(units) == sorted(source, key=lambda f: (SPLITS.index(f.location), f.name))
    assert all(len({f.location for f in unit}) == 1 for unit in units)


@given(sources, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_listing(source: list[SourceFile], random: object) -> None:
    shuffled = list(source)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_units(shuffled, UNIT) == plan_units(source, UNIT)


@given(sources)
def test_units_are_bounded_and_large_files_are_alone(source: list[SourceFile]) -> None:
    for unit in plan_units(source, UNIT):
        if len(unit) > 1:
            assert sum(f.size_bytes for f in unit) <= CAP * UNIT
            assert all(f.size_bytes < UNIT for f in unit)


@settings(max_examples=300)
@given(sources, files)
def test_added_file_changes_units_up_to_next_boundary(source: list[SourceFile], added: SourceFile) -> None:
    if (added.location, added.name) in {(f.location, f.name) for f in source}:
        return
    before, after = plan_units(source, UNIT), plan_units([*source, added], UNIT)
    changed = [unit for unit in before if unit not in after]
    # Those that change are neighbours, and hold less than the cap in all but the rare run of files that no name ends.
    if changed:
        start = before.index(changed[0])
        assert before[start : start + len(changed)] == changed
    fresh = [unit for unit in after if unit not in before]
    assert {f.name for f in flat(fresh)} - {added.name} == {f.name for f in flat(changed)}


def test_adding_files_to_many_changes_about_one_unit_each() -> None:
    source = [file(f"part-{i:05d}.csv", 100) for i in range(2000)]
    before = set(plan_units(source, UNIT))
    assert 100 < len(before) < 400
    for name in ("part-00000a.csv", "part-01000a.csv", "part-99999.csv"):
        after = set(plan_units([*source, file(name, 100)], UNIT))
        assert len(before - after) <= 2
        assert len(after - before) <= 2


def test_units_have_about_the_requested_size() -> None:
    units = plan_units([file(f"day-{i}.csv", 37) for i in range(5000)], UNIT)
    mean = sum(f.size_bytes for f in flat(units)) / len(units)
    assert 0.5 * UNIT < mean < 2 * UNIT
