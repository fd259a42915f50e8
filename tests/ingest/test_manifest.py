"""Is the table of shards beside a manifest small, whole and read only by who needs it?"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable, manifest_path
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage

COUNTS = {"train": 3000, "test": 2}


def shards() -> list[ShardInfo]:
    return [
        ShardInfo(
            path=f"units/{n // 3:032x}/{split}-{n:05d}.arrow",
            split=split,  # type: ignore[arg-type]
            rows=n + 1,
            size_bytes=10 * n,
            digest=f"{n * 7:032x}",
            unit=f"{n // 3:032x}",
        )
        for split, count in COUNTS.items()
        for n in range(count)
    ]


@pytest.fixture
def written(storage: Storage) -> DatasetManifest:
    """A manifest as it is read from a storage, with its table not open."""
    made = DatasetManifest(
        key="k", feed_schema=FeedSchema(columns=()), rows={"train": 9}, table=ShardTable.of(shards()), content_digest="c"
    )
    made.write(storage)
    found = DatasetManifest.model_validate(storage.read_json(manifest_path("k")))
    assert found == made
    return found


@pytest.fixture(params=["mapped", "fetched"])
def place(request: pytest.FixtureRequest, storage: Storage, remote: Storage) -> Storage:
    return storage if request.param == "mapped" else remote


def test_opened_manifest_lists_the_shards_it_was_made_of(written: DatasetManifest, place: Storage) -> None:
    opened, made = written.opened(place), shards()
    assert list(opened.shards) == made and opened.shards[-1] == made[-1] and opened.num_shards == 3002
    assert [list(opened.shards_of(split)) for split in ("train", "validation", "test")] == [made[:3000], [], made[3000:]]
    assert opened.shards_of("train").rows.tolist() == list(range(1, 3001)) and not opened.shards_of("validation")
    assert opened.table.size_bytes["test"] == opened.shards_of("test").size_bytes.sum() == 10
    assert opened.shards.units == [f"{n:032x}" for n in range(1000)]
    with pytest.raises(IndexError):
        opened.shards[3002]


def test_manifest_and_its_pickle_do_not_grow_with_shards(written: DatasetManifest, storage: Storage) -> None:
    assert storage.size(manifest_path("k")) < 1000 and len(pickle.dumps(written)) < 2000
    (table,) = [size for name, size in storage.sizes("datasets/k").items() if name == f"shards-{written.table.digest}.arrow"]
    assert table < 120 * 3002


def test_local_table_is_mapped_not_read(written: DatasetManifest, storage: Storage) -> None:
    rows = written.opened(storage).shards.rows
    address = rows.__array_interface__["data"][0]
    lines = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.rstrip().endswith(f"{written.table.digest}.arrow")
    ]
    spans = [tuple(int(part, 16) for part in line[0].split("-")) for line in lines]
    assert any(begin <= address < end for begin, end in spans) and not rows.flags.writeable
    assert np.array_equal(rows[:3], [1, 2, 3])


def test_unopened_table_is_an_error_not_an_empty_one(written: DatasetManifest) -> None:
    with pytest.raises(ValueError, match="is not open"):
        written.shards_of("train")


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_damaged_table_is_refused(
    written: DatasetManifest, place: Storage, storage: Storage, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"datasets/k/shards-{written.table.digest}.arrow"
    content = storage.read_bytes(path)
    if damage == "missing":
        storage.delete(path)
    else:
        storage.write_bytes(path, content[:-9] if damage == "cut" else content.replace(b"test", b"tost", 1))
    monkeypatch.setattr("penstock.ingest.manifest._fetched", {})  # as in a process that has not fetched it yet
    with pytest.raises(DataError, match="is missing" if damage == "missing" else "has another content") as caught:
        written.opened(place)
    assert path in caught.value.message and "run the pipeline again" in caught.value.next_step
    assert DatasetManifest.read(place, "k") is None


def test_rank_that_reads_a_table_does_not_load_pandas(written: DatasetManifest, storage: Storage) -> None:
    code = (
        "import sys; from penstock.ingest.manifest import DatasetManifest; from penstock.storage import Storage\n"
        f"found = DatasetManifest.read(Storage({str(storage.root)!r}), 'k').shards_of('test')\n"
        "print(found.rows.sum() + found.size_bytes.sum(), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["13", "False"]
