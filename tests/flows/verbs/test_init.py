"""Does `penstock init` make projects that are whole, real and valid, and never overwrite anything?"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import jsonschema
import numpy as np
import pyarrow.csv
import pyarrow.dataset
import pytest
import yaml

from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.init import TEMPLATES, create_project
from penstock.ingest.files.listing import list_source
from penstock.ingest.formats.registry import format_of
from penstock.usercode.capture import capture

ALL = sorted(TEMPLATES)


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One project per template, to read from."""
    root = tmp_path_factory.mktemp("projects")
    for template in ALL:
        create_project(root / template, template)
    return {template: root / template for template in ALL}


@pytest.mark.parametrize("template", ALL)
def test_project_has_files_listed_in_readme(projects: dict[str, Path], template: str) -> None:
    names = {path.name for path in projects[template].iterdir()}
    assert {"pipeline.yaml", "pipeline.schema.json", "README.md", ".gitignore", "data"} <= names
    code = {"boosted": set(), "ray-loop": {"loop.py"}}.get(template, {"model.py"})  # trees need none
    assert {name for name in names if name in ("model.py", "loop.py")} == code


@pytest.mark.parametrize("template", ALL)
def test_template_file_is_valid_and_names_its_data_and_code(projects: dict[str, Path], template: str) -> None:
    loaded = load_spec(projects[template] / "pipeline.yaml")
    listed = list_source(loaded.spec.data, loaded.base_dir, format_of(loaded.spec.data).extensions).files
    assert {Path(file.uri) for file in listed} == {path for path in (projects[template] / "data").rglob("*") if path.is_file()}
    recipe = loaded.spec.train.recipe
    assert capture(recipe, loaded.base_dir).digest if recipe else loaded.spec.train.framework == "xgboost"


@pytest.mark.parametrize("template", ALL)
def test_template_file_matches_schema(projects: dict[str, Path], template: str) -> None:
    text = (projects[template] / "pipeline.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=./pipeline.schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json.loads((projects[template] / "pipeline.schema.json").read_text()))


@pytest.mark.parametrize("template", ALL)
def test_user_code_of_a_project_imports_nothing_of_penstock(projects: dict[str, Path], template: str) -> None:
    for path in projects[template].glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not {str(name).split(".")[0] for name in names} & {"penstock"}


def test_template_images_are_complete(projects: dict[str, Path]) -> None:
    data = projects["images"] / "data"
    train, test = (pyarrow.dataset.dataset(data / split).to_table() for split in ("train", "test"))
    assert train.num_rows + test.num_rows == 1797
    assert len(list((data / "train").iterdir())) == 6
    image = train.schema.field("image").type
    assert (str(image.value_type), image.list_size) == ("uint8", 64)
    assert set(test["label"].to_pylist()) == set(range(10))


def test_tumours_have_all_rows_and_columns(projects: dict[str, Path]) -> None:
    table = pyarrow.csv.read_csv(projects["tabular"] / "data" / "breast_cancer.csv")
    assert (table.num_rows, table.num_columns) == (569, 31)
    assert "mean_concave_points" in table.column_names
    assert table["diagnosis"].to_pylist().count("malignant") == 212


def test_text_template_splits_share_no_file(projects: dict[str, Path]) -> None:
    train, test = ({path.name for path in (projects["text"] / "data" / split).iterdir()} for split in ("train", "test"))
    assert train and test and not train & test
    assert sum(path.stat().st_size for path in (projects["text"] / "data" / "train").iterdir()) > 700_000


def test_text_becomes_ascii_codes_of_equal_length(projects: dict[str, Path]) -> None:
    to_tokens = capture("transforms.py:to_tokens", projects["text"]).load()
    tokens = to_tokens({"text": np.array(["ab\n", "é~c"], dtype=object)})["tokens"]
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [[97, 98, 10], [63, 126, 99]]


def test_projects_of_one_template_are_equal_bytes(projects: dict[str, Path], tmp_path: Path) -> None:
    for path in create_project(tmp_path / "again", "tabular"):
        assert path.read_bytes() == (projects["tabular"] / path.relative_to(tmp_path / "again")).read_bytes()


def test_init_returns_pipeline_file_first(tmp_path: Path) -> None:
    written = create_project(tmp_path / "p", "images")
    assert written[0] == tmp_path / "p" / "pipeline.yaml"
    assert {path for path in (tmp_path / "p").rglob("*") if path.is_file()} == set(written)


@pytest.mark.parametrize("name", ["pipeline.yaml", "model.py", "README.md", "data"])
def test_existing_file_is_named_and_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(SpecError, match=name):
        create_project(tmp_path, "images")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_init_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    create_project(tmp_path, "tabular")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_file_in_place_of_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(SpecError, match="taken is a file"):
        create_project(tmp_path / "taken", "images")
