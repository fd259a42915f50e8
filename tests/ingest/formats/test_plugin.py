"""Another author's package adds a format: the one that docs/extend/format.md shows, installed for real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import DataError, PreflightError
from penstock.flows.spec_file import schema_json
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats import registry, section
from penstock.ingest.formats.reader import FileFacts
from penstock.plugins import Plugins
from tests import ROOT
from tests.plugin_package import install_package

PAGE = (ROOT / "docs" / "extend" / "format.md").read_text(encoding="utf-8")

TRAIN = """\
name: widths
{data}
train: {{recipe: model.py:Net, max_steps: 4, batch_rows: 16, workers: 1, cpus_per_worker: 0.5}}
register: {{name: widths}}
"""

MODEL = """\
import torch


class Net:
    def build_model(self, schema):
        return torch.nn.Linear(2, schema.num_classes)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        return model(torch.stack([batch["height"], batch["weight"]], dim=1).float())
"""


def block(language: str) -> str:
    """The page's one block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page's package is installed in."""
    group, entry = block("toml").strip().splitlines()
    assert group == f'[project.entry-points."{registry.FORMATS.group}"]'
    return install_package(tmp_path_factory.mktemp("acme"), registry.FORMATS.group, entry, block("python"))


def make_project(folder: Path) -> Path:
    """Two files of 60 rows each, and the page's pipeline file with a recipe; returns the pipeline file."""
    (folder / "data").mkdir()
    for part in range(2):
        rows = [f"{150 + row:6d}{50 + row / 4 + part:8.2f}{row % 2:2d}\n" for row in range(60)]
        (folder / "data" / f"part-{part}.fw").write_text("".join(rows))
    (folder / "model.py").write_text(MODEL)
    file = folder / "pipeline.yaml"
    file.write_text(TRAIN.format(data=block("yaml")))
    return file


def found_at(site: Path) -> dict[str, str]:
    """Environment in which processes find the package."""
    return {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}


def in_process(site: Path, code: str, *words: str) -> dict[str, Any]:
    """Run `code` where the package is installed; it prints one JSON object."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env={**os.environ, **found_at(site)}, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


SHOWN = """
import json, pickle, sys
from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec, schema_json
loaded = load_spec(sys.argv[1])
imported = [module for module in ("acme_fixed", "torch", "ray") if module in sys.modules]
refused = {}
for override in sys.argv[2:]:
    try:
        load_spec(sys.argv[1], [override])
    except SpecError as error:
        refused[override] = error.problems
from penstock.tasks.records.keys import stage_keys
inputs = stage_keys(loaded.project, lambda *_: None)["read"].inputs
sent = pickle.dumps(loaded.spec.data)
back = pickle.loads(sent) == loaded.spec.data
schema = json.loads(schema_json())
print(json.dumps(dict(imported=imported, refused=refused, inputs=inputs, sent=sent.hex(), back=back, schema=schema)))
"""

REFUSED = {
    "data.fixed_width.withs={a: 1}": "data.fixed_width.withs: unknown key; did you mean 'widths'?",
    "data.fixed_width={}": "data.fixed_width.widths: missing; this key is required",
    "data.format=fixed_with": "python, fixed_width; did you mean 'fixed_width'?",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, site: Path) -> dict[str, Any]:
    """What one process shows of the package and a pipeline file that names its format."""
    return in_process(site, SHOWN, str(make_project(tmp_path_factory.mktemp("widths"))), *REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("override", REFUSED)
def test_problem_names_what_is_wrong_with_the_options(shown: dict[str, Any], override: str) -> None:
    assert any(REFUSED[override] in problem for problem in shown["refused"][override]), shown["refused"]


def test_the_schema_of_the_file_has_the_format_and_its_options(shown: dict[str, Any]) -> None:
    schema = shown["schema"]
    data = schema["$defs"]["DataSpec"]
    assert data["properties"]["format"]["enum"][-2:] == ["python", "fixed_width"]
    assert "`fixed_width` (.fw): A number every so many characters" in data["properties"]["format"]["description"]
    assert data["properties"]["fixed_width"]["$ref"] == "#/$defs/FixedWidthOptions"
    assert "fixed_width" not in data["required"]
    widths = schema["$defs"]["FixedWidthOptions"]["properties"]["widths"]
    assert widths["description"].startswith("Name of a column to its width")


def test_the_key_of_read_has_the_packages_version_and_the_options(shown: dict[str, Any]) -> None:
    inputs = shown["inputs"]
    assert inputs["version.format"] == "acme-penstock==1.2"
    assert inputs["data.fixed_width.widths"] == {"height": 6, "weight": 8, "label": 2}
    assert not any(name.startswith("data.text") for name in inputs), "options of other formats run nothing again"


ON_A_NODE = """
import json, pickle, sys
from penstock.errors import PreflightError
from penstock.flows.spec_file import load_spec
answer = {}
if len(sys.argv) > 2:
    load_spec(sys.argv[2])
    answer["imported"] = "acme_fixed" in sys.modules
try:
    answer["got"] = pickle.loads(bytes.fromhex(sys.argv[1])).format
except PreflightError as error:
    answer["refused"] = error.message
print(json.dumps(answer))
"""


def test_a_package_is_imported_only_by_files_that_name_its_format(tmp_path: Path, site: Path, shown: dict[str, Any]) -> None:
    assert (shown["imported"], shown["back"]) == (["acme_fixed"], True)
    file = make_project(tmp_path)
    file.write_text(re.sub(r"  fixed_width:\n.*\n", "", file.read_text()).replace("fixed_width", "csv"))
    assert in_process(site, ON_A_NODE, shown["sent"], str(file)) == {"imported": False, "got": "fixed_width"}


def test_the_reader_of_the_page_names_a_broken_row(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    from acme_fixed import FixedWidthOptions, FixedWidthReader  # type: ignore[import-not-found]

    path = tmp_path / "a.fw"
    path.write_text(" 1 2\n x 2\n")
    file = SourceFile(uri=str(path), name="a.fw", location="train", size_bytes=10, fingerprint="f")
    reader = FixedWidthReader(FixedWidthOptions(widths={"a": 2, "b": 2}))
    with pytest.raises(DataError, match=r"a\.fw, row 1 \(from 0\): column 'a' holds 'x', which does not read as double"):
        reader.inspect(file)
    path.write_text(" 1 2\n 3 4\n")
    assert reader.inspect(file) == FileFacts({"a": pa.float64(), "b": pa.float64()}, 2)
    (table,) = reader.tables(file, pa.schema({"b": pa.int64()}), 10)
    assert table.to_pydict() == {"b": [2, 4]}


def test_a_class_that_is_no_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = EntryPoint("odd", "collections:OrderedDict", registry.FORMATS.group)
    monkeypatch.setattr("penstock.plugins.entry_points", lambda group: [odd])
    monkeypatch.setattr(registry, "FORMATS", Plugins("format", odd.group, {}, registry.FORMATS._needs))
    with pytest.raises(PreflightError, match=r"the format 'odd' .*OrderedDict.* has no extensions, Options, listing, reader"):
        registry.format_named("odd")


def test_a_format_with_options_cannot_have_the_name_of_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"label": "penstock.ingest.formats.text:TextFormat"}
    for module in (registry, section):
        monkeypatch.setattr(module, "FORMATS", Plugins("format", "penstock.formats", own))
    with pytest.raises(PreflightError, match=r"has options, for which data\.label is taken"):
        section.data_spec(("label",))


def test_a_node_with_another_version_of_the_package_refuses_by_name(tmp_path: Path, shown: dict[str, Any]) -> None:
    (entry,) = block("toml").strip().splitlines()[1:]
    newer = install_package(tmp_path / "newer", registry.FORMATS.group, entry, block("python"), version="1.3")
    for there, said in ((newer, "acme-penstock==1.3"), (tmp_path, "nothing of that name")):
        refused = in_process(there, ON_A_NODE, shown["sent"])["refused"]
        assert refused.startswith(f"the format 'fixed_width' is acme-penstock==1.2 in the driver and {said} on ")


def test_a_broken_package_stops_no_schema_of_the_file(tmp_path: Path) -> None:
    broken = install_package(tmp_path / "f", registry.FORMATS.group, 'torn = "acme_torn:Torn"', "import no_such_module\n")
    step = install_package(
        tmp_path / "t", "penstock.transforms", 'torn = "acme_step:Torn"', "import no_such_module\n", name="acme-step"
    )
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from penstock.flows.spec_file import schema_json; print(schema_json())"
    )
    schema = in_process(broken, script, str(step))
    assert schema["$defs"]["DataSpec"]["properties"]["format"]["enum"][-1] == "python"
    assert "torn" not in json.dumps(schema) and "standard_scaler" in json.dumps(schema)


def test_the_schema_has_only_known_formats() -> None:
    enum = json.loads(schema_json())["$defs"]["DataSpec"]["properties"]["format"]["enum"]
    assert enum == list(registry.FORMATS.names)
