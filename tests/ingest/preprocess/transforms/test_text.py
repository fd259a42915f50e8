"""Categories that are unknown, many, or several in a row; and text as tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pydantic import ValidationError

from penstock.errors import DataError
from penstock.ingest.preprocess.transform_spec import TransformSpec
from tests import ROOT
from tests.ingest.preparing import Source

TRAIN = pa.table({"c": ["a", "b", "a"], "i": [1, 2, 3]})
TEST = pa.table({"c": ["b", "q"], "i": [1, 9]})


def source_of(folder: Path, steps: list[Any], train: pa.Table = TRAIN, test: pa.Table = TEST, **data: Any) -> Source:
    return Source.of(folder, {"train/a.parquet": train, "test/a.parquet": test}, steps, test="test", **data)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"ordinal": {"columns": ["c"], "unknown": "code"}}, [1, 2]),
        ({"one_hot": {"columns": ["c"]}}, [[0, 1], [0, 0]]),
        ({"one_hot": {"columns": ["c"], "unknown": "code"}}, [[0, 1, 0], [0, 0, 1]]),
        ({"one_hot": {"columns": ["c"], "unknown": "code", "max_categories": 1}}, [[0, 1], [0, 1]]),
    ],
)
def test_unknown_category_is_counted_and_coded(tmp_path: Path, step: dict[str, Any], expected: list[Any]) -> None:
    source = source_of(tmp_path, [step])
    manifest = source.materialize()
    assert source.column(manifest, "c", "test").tolist() == expected
    rare = step.get("one_hot", {}).get("max_categories")
    assert manifest.extra["unseen_categories"] == {"c": 3 if rare else 1}


def test_unknown_category_may_be_null_then_filled(tmp_path: Path) -> None:
    fill = {"imputer": {"columns": ["c"], "strategy": "constant", "fill_value": -1}}
    source = source_of(tmp_path, [{"ordinal": {"columns": ["c"], "unknown": "ignore"}}, fill])
    assert source.column(source.materialize(), "c", "test").tolist() == [1, -1]


@pytest.mark.parametrize("step", [{"one_hot": {"columns": ["c"], "unknown": "error"}}, {"ordinal": {"columns": ["c"]}}])
def test_unknown_category_may_be_an_error(tmp_path: Path, step: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"a value in c that the train split does not have; first: .*test/a.parquet, row 1"):
        source_of(tmp_path, [step]).materialize()


def test_one_hot_error_with_max_categories_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown must be ignore or code"):
        TransformSpec.model_validate({"one_hot": {"columns": ["c"], "unknown": "error", "max_categories": 2}})


def test_recipe_page_tokenizer_makes_token_lists(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").split("### Text as tokens\n")[1]
    code, steps = page.split("```python\n")[1].split("```")[0], page.split("```yaml\n")[1].split("```")[0]
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}

    def write(vocabulary: dict[str, int]) -> None:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))

    write(words)
    table = pa.table({"text": ["The  cat", "the dog sat", "sat"]})
    files: dict[str, Any] = {"tokens.py": code, "train/a.parquet": table}
    source = replace(Source.of(tmp_path, files, yaml.safe_load(steps)["preprocess"]), ships_params=True)
    ((_, rows),) = source.preparation().tables()
    assert [row.as_py() for row in rows.column("tokens").combine_chunks().storage] == [[1, 2], [1, 0, 3], [3]]
    before = source.code["tokens.py:tokenize"].digest
    write({**words, "dog": 4})
    assert source.code["tokens.py:tokenize"].digest != before
