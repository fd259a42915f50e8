"""The guide on data loading: each block's function on rows that penstock has prepared. The table is in README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.datasets import load_iris

from penstock.errors import SpecError
from tests.guides.running import Prepared, checkpoints, prepare, reports, run_alone, run_on_two


def numbers(folder: Path, rows: int = 100) -> Prepared:
    return prepare(folder, {"train": pa.table({"x": np.arange(rows)})})


def test_quickstart_gets_floats_and_each_row_once_an_epoch(tmp_path: Path) -> None:
    x = np.arange(200)
    prepared = prepare(tmp_path, {"train": pa.table({"x": x, "y": x / 200})})
    job = prepared.job("ingest_programs.py:quickstart")
    ran = run_alone(job)
    assert ran.printed == [f"epoch {epoch} rows 200 torch.float32" for epoch in (0, 1)]
    assert (ran.result.status, ran.result.state.step, len(checkpoints(job))) == ("finished", 4, 2)
    two = prepared.job("ingest_programs.py:quickstart", run="two", workers=2)
    assert [ran.printed for ran in run_on_two(two)] == [[f"epoch {epoch} rows 100 torch.float32" for epoch in (0, 1)]] * 2


def test_config_that_makes_the_shards_itself_is_called(tmp_path: Path) -> None:
    plain, own = (
        numbers(tmp_path).job("ingest_programs.py:numbers", run=run, workers=2, **datasets)
        for run, datasets in (("plain", {}), ("own", {"datasets": "ingest_programs.py:OwnShards"}))
    )
    assert [ran.printed for ran in run_on_two(own)] == [ran.printed for ran in run_on_two(plain)]


def messages(folder: Path) -> Prepared:
    lines = [
        f"{'spam' if each % 3 == 0 else 'ham'}\t{'win money' if each % 3 == 0 else 'see you'} at {each}" for each in range(300)
    ]
    return prepare(folder, {"train": pa.table({"text": lines})}, any_type=True)  # as train.loop sets it


def test_lines_of_text_reach_every_worker_in_each_epoch(tmp_path: Path) -> None:
    prepared = messages(tmp_path)
    alone = run_alone(prepared.job("ingest_programs.py:over_lines", run="alone"))
    assert alone.printed == ["sizes 128 128 44 different 300 ham\tsee you at 1"] * 2
    two = run_on_two(prepared.job("ingest_programs.py:over_lines", run="two", workers=2))
    assert [line.partition(" ham")[0] for each in two for line in each.printed] == ["sizes 128 22 different 150"] * 4


def test_collate_function_tokenizes_lines_of_text(tmp_path: Path) -> None:
    job = messages(tmp_path).job("ingest_programs.py:tokenized")
    ran = run_alone(job)
    losses = reports(job, "rows")
    assert (ran.result.status, ran.result.state.step, len(losses)) == ("finished", 4 * 5, 4) and losses[-1] < losses[0] / 2


def test_datasets_to_split_name_the_held_out_rows_val(tmp_path: Path) -> None:
    tables = {"train": pa.table({"x": np.arange(140)}), "validation": pa.table({"x": np.arange(60)})}
    for number, (datasets, held) in enumerate([({"val": "whole"}, 60), ({"train": "split", "val": "split"}, 30)]):
        job = prepare(tmp_path / str(number), tables).job("ingest_programs.py:over_both", workers=2, datasets=datasets)
        assert [ran.printed for ran in run_on_two(job)] == [["train rows 70", f"val rows {held}"]] * 2


def test_rows_of_an_epoch_are_prefetched_or_not_the_same(tmp_path: Path) -> None:
    prepared = numbers(tmp_path)
    plain = run_alone(prepared.job("ingest_programs.py:numbers"))
    ahead = run_alone(prepared.job("ingest_programs.py:numbers", {"options": {"prefetch_batches": 10}}, run="ahead"))
    assert ahead.printed == plain.printed and len(plain.printed[0].split()) == 100


def test_every_epoch_is_shuffled_anew_and_a_seed_repeats_it(tmp_path: Path) -> None:
    first, second = (run_alone(numbers(tmp_path / run).job("ingest_programs.py:numbers")).printed for run in ("one", "two"))
    epochs = [[int(x) for x in line.split()] for line in first]
    assert first == second
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == [*range(100)] != epochs[0]


def test_local_shuffle_is_refused_with_the_key_to_write(tmp_path: Path) -> None:
    job = numbers(tmp_path).job("ingest_programs.py:numbers", {"options": {"local_shuffle_buffer_size": 10_000}})
    with pytest.raises(SpecError, match="local_shuffle_buffer_size=10000") as refused:
        run_alone(job)
    assert "shuffle: {mode: global}" in str(refused.value.next_step)


def test_transforms_before_the_cache_run_once_and_those_after_it_each_epoch(tmp_path: Path) -> None:
    length = load_iris().data[:, 0].astype(np.float32)
    table = pa.table({"length": length})
    steps = [{"map_batches": "ingest_programs.py:normalize_length"}]
    (tmp_path / "ingest_programs.py").write_bytes((Path(__file__).parent / "ingest_programs.py").read_bytes())
    ran = run_alone(prepare(tmp_path, {"train": table}, steps).job("ingest_programs.py:augmented"))
    least, most = float(np.float32((length.min() - 4) / 4)), float(np.float32((length.max() - 4) / 4))
    assert len(ran.printed) == 2 and ran.printed[0] == ran.printed[1]
    assert [float(word) for word in ran.printed[0].split()[1:]] == pytest.approx([least, most, 150], rel=1e-5)
