"""The pipeline file: every problem at its line, overrides, origins, and the published schema."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.config import OnResume, resume_rules
from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec, schema_json
from penstock.training.spec import TrainSpec
from tests.drills.project import make_project

GOOD = """\
name: demo
data:
  format: csv
  train: rows.csv
  validation: {fraction: 0.1}
  label: target
train:
  recipe: model.py:Net
  epochs: 2
  batch_rows: 64
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    return file


def problems_of(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(file, overrides)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def test_defaults_and_file_values_carry_their_origin(tmp_path: Path) -> None:
    loaded = load_spec(write(tmp_path, GOOD), ["train.epochs=7"])
    assert loaded.spec.train.epochs == 7
    assert loaded.origins["train.epochs"] == "--set train.epochs"
    assert loaded.origins["train.batch_rows"] == "pipeline.yaml:10"
    assert loaded.origins["train.retries"] == "default"


def test_mapping_from_set_is_origin_of_its_leaves(tmp_path: Path) -> None:
    loaded = load_spec(write(tmp_path, GOOD), ["train.params={hidden: 3}"])
    assert loaded.spec.train.params == {"hidden": 3}
    assert loaded.origins["train.params.hidden"] == "--set train.params"


def test_relative_storage_is_beside_pipeline_file(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, GOOD)).spec.storage == str(tmp_path / ".penstock")
    remote = load_spec(write(tmp_path, GOOD), ["storage=s3://bucket/prefix"])
    assert remote.spec.storage == "s3://bucket/prefix"


def test_all_problems_are_reported_with_lines(tmp_path: Path) -> None:
    text = (
        GOOD.replace("batch_rows: 64", "batch_rows: 0").replace("epochs: 2", "epoch: 2").replace("format: csv", "format: xlsx")
    )
    found = problems_of(write(tmp_path, text))
    assert any(p.startswith("pipeline.yaml:10: train.batch_rows:") for p in found)
    assert any(p.startswith("pipeline.yaml:9: train.epoch:") and "did you mean 'epochs'?" in p for p in found)
    assert any(p.startswith("pipeline.yaml:3: data.format:") and "xlsx" in p for p in found)


def test_key_without_section_suggests_section(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD), "epochs=3", "shufle=1")
    assert "--set epochs: unknown key; did you mean 'train.epochs'?" in found
    assert any("did you mean 'shuffle'?" in problem for problem in found)


@pytest.mark.parametrize("name, meant", [("My Tumours", "; did you mean 'my-tumours'?"), ("Größe", ""), ("---", "")])
def test_malformed_name_gives_the_rule(tmp_path: Path, name: str, meant: str) -> None:
    (found,) = problems_of(write(tmp_path, GOOD), f"name={json.dumps(name)}")
    assert found.endswith(f" (Name of the pipeline: lower-case letters, digits, `-` and `_`){meant}")


def test_malformed_store_gives_the_rule(tmp_path: Path) -> None:
    address, endpoint, prefix = problems_of(
        write(tmp_path, GOOD), "stores={b: {anonymous: true}, 's3://c': {endpoint: 'minio:9000', env_prefix: my-keys}}"
    )
    assert "--set stores: 'b': " in address and "(`s3://bucket`, or `s3://bucket/prefix`, to how it is reached" in address
    assert "stores.s3://c.endpoint: 'minio:9000': " in endpoint and "(URL of the store, such as `https://minio" in endpoint
    assert "stores.s3://c.env_prefix: 'my-keys': " in prefix and "(Upper-case letters, digits and `_`: credentials" in prefix


def test_wrong_split_rule_is_one_problem(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("fraction: 0.1", "fraction: 1.5"))
    assert problems_of(file) == ["pipeline.yaml:5: data.validation.fraction: 1.5: input should be less than 1"]
    found = problems_of(write(tmp_path, GOOD), "data.validation=3", "data.test.part=0.1")
    assert found == [
        "--set data.validation: 3: input should be a valid string",
        "--set data.test.part: unknown key; known here: after, before, by, fraction, stratify",
    ]
    (found,) = problems_of(write(tmp_path, GOOD), "data.test={by: row}")
    assert "test needs a fraction, or after or before" in found


def test_indivisible_batch_rows_names_nearest_values(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD), "train.batch_rows=500", "train.workers=3")
    assert found == ["--set train.batch_rows: 500 does not divide over 3 workers; use 498 or 501"]
    found = problems_of(write(tmp_path, GOOD), "train.workers=3", "shuffle.seed=1")
    assert found == ["pipeline.yaml:10: train.batch_rows: 64 does not divide over 3 workers; use 63 or 66"]


@pytest.mark.parametrize(
    ("metric", "wrong", "right"), [("accuracy", "min", "max"), ("r2", "min", "max"), ("loss", "max", "min")]
)
def test_mode_opposite_to_metric_is_refused(tmp_path: Path, metric: str, wrong: str, right: str) -> None:
    entry = "train.checkpoint.best={metric: val/%s, mode: %s}"
    assert load_spec(write(tmp_path, GOOD), [entry % (metric, right)])
    (problem,) = problems_of(write(tmp_path, GOOD), entry % (metric, wrong))
    assert f"train.checkpoint.best.mode: 'val/{metric}' is better the " in problem and problem.endswith(f"write mode: {right}")
    (problem,) = problems_of(write(tmp_path, GOOD), "train.checkpoint.best={metric: val/f1}")
    assert problem.endswith("and mode: min keeps the lowest; write mode: max"), "the default does not excuse it"
    assert load_spec(write(tmp_path, GOOD), ["train.checkpoint.best={metric: val/users_own, mode: min}"])


def test_problem_made_by_set_option_names_the_option(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD), "stores={a: {secret_key: canary}}", "stores.a.secret_key=canary")
    assert found and not any("canary" in problem for problem in found)
    found = problems_of(write(tmp_path, GOOD.replace("epochs: 2", "epochs: 0")), "train.workers=-1")
    assert [problem.split(": ")[0] for problem in found] == ["pipeline.yaml:9", "--set train.workers"]


@pytest.mark.parametrize(
    "override",
    [
        *("shuffle.seed=yes", "train.learning_rate=on", "train.gpus=no", "train.epochs=off", "materialize.unit_bytes=yes"),
        *("data.csv.skip_rows=true", "data.images.size.0=true", "data.validation.fraction=yes", "evaluate.slices.0.age.1=yes"),
        "preprocess.0.ragged.pad_value=no",
    ],
)
def test_boolean_for_number_is_refused(tmp_path: Path, override: str) -> None:
    more = ["data.images={size: [8, 8]}", "preprocess=[{ragged: {columns: [a]}}]", "evaluate={slices: [{age: [0, 2]}]}"]
    key, word = override.split("=")
    boolean = word in ("yes", "on", "true")
    (problem,) = problems_of(write(tmp_path, GOOD), *more, override)
    assert problem.startswith(f"--set {key}: {boolean}: ")
    assert "YAML reads yes, no, on, off, true and false as booleans" in problem


def test_bare_column_name_is_one_problem(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD), "preprocess=[{imputer: {columns: age}}]")
    assert found == [
        "--set preprocess: preprocess.0.imputer.columns: 'age': columns are a list, such as [age], or '*' for all of them"
    ]


def test_missing_key_names_line_of_its_section(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD.replace("  train: rows.csv\n", "")))
    assert found == ["pipeline.yaml:2: data.train: missing; this key is required"]


def test_duplicate_key_is_refused(tmp_path: Path) -> None:
    for options in ((), ("train.epochs=3",)):  # an option has no part in it
        (found,) = problems_of(write(tmp_path, GOOD + "name: again\n"), *options)
        assert found.startswith("pipeline.yaml:") and "name: the key is there twice" in found


def test_broken_yaml_names_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"pipeline\.yaml:\d+:\d+: not valid YAML"):
        load_spec(write(tmp_path, GOOD + "  x: [1,\n"))


def test_yaml_tags_running_code_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="not valid YAML"):
        load_spec(write(tmp_path, GOOD + "register: !!python/object/apply:os.system ['true']\n"))


MULTIPLIED = ", ".join(f"{name}: &{name} [{', '.join([f'*{above}'] * 9)}]" for above, name in pairwise("abcdefghi"))


@pytest.mark.parametrize("params", ["&p {a: *p}", "{a: &a [x], " + MULTIPLIED + "}"])
def test_endless_aliases_are_refused(tmp_path: Path, params: str) -> None:
    with pytest.raises(SpecError, match="not valid YAML: it has more than 100,000 values: an alias"):
        load_spec(write(tmp_path, GOOD.replace("  epochs: 2", f"  epochs: 2\n  params: {params}")))
    (problem,) = problems_of(write(tmp_path, GOOD), f"train.params={params}")
    assert "an alias (*name) holds itself" in problem


@pytest.mark.parametrize("override", ["train.epochs", "=3", "preprocess.4.drop=[a]"])
def test_malformed_override_is_named(tmp_path: Path, override: str) -> None:
    assert any("--set" in p for p in problems_of(write(tmp_path, GOOD + "preprocess: []\n"), override))


def test_missing_file_suggests_init(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="penstock init"):
        load_spec(tmp_path / "absent.yaml")


def test_schema_has_keys_of_all_sections() -> None:
    schema = json.loads(schema_json())
    assert {"name", "data", "train", "register"} <= schema["properties"].keys()
    assert "batch_rows" in schema["$defs"]["TrainSpec"]["properties"]
    assert schema["additionalProperties"] is False


def test_every_train_field_has_a_rule_for_resume() -> None:
    rules = dict(resume_rules(TrainSpec))
    assert rules["epochs"] is OnResume.FREE
    assert rules["checkpoint.every_steps"] is OnResume.FREE
    assert rules["learning_rate"] is OnResume.WARN
    assert rules["workers"] is OnResume.WARN
    assert rules["batch_rows"] is OnResume.FORBIDDEN
    assert rules["params"] is OnResume.WARN


def test_secret_in_file_is_refused_and_hidden(tmp_path: Path) -> None:
    override = "train.params={api_key: hunter2, pad_token: <pad>, url: 'https://me:hunter2@host/x', door: 'sftp://me@host/x'}"
    found = problems_of(write(tmp_path, GOOD), override)
    assert [problem.split(": ")[1] for problem in found] == ["train.params.api_key", "train.params.url"]
    assert "hunter2" not in str(found) and "environment" in found[0]


def test_column_named_like_a_secret_is_accepted(tmp_path: Path) -> None:
    overrides = ["data.types={token: string}", "preprocess=[{cast: {password: int64}}, {rename: {api_key: key}}]"]
    assert load_spec(write(tmp_path, GOOD), overrides).spec.data.types == {"token": "string"}
    found = problems_of(write(tmp_path, GOOD), "data.types={token: 'https://me:hunter2@host/x'}")
    assert any("looks like a secret" in problem for problem in found)


@pytest.mark.parametrize("override", ["alias=latest", "alias=V2", "alias=a/b", "name=a:b", "name=' '", "name=v1.2"])
def test_model_name_that_mlflow_refuses_is_refused_at_load(tmp_path: Path, override: str) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD), f"register.{override}")
    assert f"register.{override.split('=')[0]}: " in problem
    assert "MLflow" in problem or "letters, digits" in problem


def test_wrong_entry_of_datasets_is_one_problem(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD), "train.datasets={holdout: testt}")
    assert "train.datasets.holdout: 'testt': input should be 'split'" in problem


def test_window_of_shards_needs_windowed_mode(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GOOD), "shuffle.window_of=shards")
    assert problem.endswith("shuffle.window_of: mode: global has no windows; set mode: windowed, or leave it out")
    assert load_spec(write(tmp_path, GOOD), ["shuffle={mode: windowed, window_of: shards}"]).spec.shuffle.window_of == "shards"


def test_model_without_alias_and_name_with_blanks_load(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD), ["register.alias=null", "register.name=my model"]).spec
    assert (spec.register_.alias, spec.register_.name) == (None, "my model")


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("s3:/bucket/x", "a URL has two slashes; did you mean s3://bucket/x?"),
        ("s3://", "it names no bucket; write s3://bucket/prefix"),
        ("s4://bucket/x", "there is no store 's4'; did you mean 's3'?"),
        ("${STATE}/x", "environment variables are not put in; write it out, or let the shell do it: --set storage=..."),
    ],
)
def test_storage_of_unknown_scheme_is_refused(tmp_path: Path, storage: str, says: str) -> None:
    with pytest.raises(SpecError) as refused:
        load_spec(make_project(tmp_path / "p", files=1), [f"storage='{storage}'"])
    assert refused.value.problems == (f"--set storage: '{storage}': {says}",)
    assert load_spec(tmp_path / "p", ["storage=a:b/c"]).spec.storage == f"{tmp_path}/p/a:b/c"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("s3:/bucket/x", "a URL has two slashes; did you mean s3://bucket/x?"),
        ("GS:/bucket/*.csv", "a URL has two slashes; did you mean gs://bucket/*.csv?"),
        ("https:/host/x.csv", "a URL has two slashes; did you mean https://host/x.csv?"),
        ("file:/rows.csv", "a URL has two slashes; did you mean file:///rows.csv?"),
        ("S3://bucket/x", "a store's name is in lower case; did you mean s3://bucket/x?"),
    ],
)
def test_malformed_url_of_rows_is_refused(tmp_path: Path, location: str, says: str) -> None:
    for key in ("data.train", "data.validation", "data.test"):
        assert problems_of(write(tmp_path, GOOD), f"{key}={location}") == [f"--set {key}: {location!r}: {says}"]
    assert load_spec(write(tmp_path, GOOD), ["data.train=2026:/x"]).spec.data.train == "2026:/x"


def test_missing_pipeline_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text("")
    (tmp_path / "other.yaml").write_text("")
    with pytest.raises(SpecError, match=r"no pipeline file at .*/pipelin\.yaml; .* has other\.yaml, pipeline\.yaml"):
        load_spec(tmp_path / "pipelin.yaml")
