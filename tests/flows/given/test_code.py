"""Which file does code become that a program holds as an object?"""

from __future__ import annotations

import linecache
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest

from penstock.errors import DataError, SpecError
from penstock.flows.given.code import GivenCode
from penstock.flows.given.load import load_given
from penstock.flows.run.open_attempt import _given_files
from penstock.flows.spec_file import load_spec
from penstock.usercode.capture import UserCode, capture

FIRST = """\
import json
import logging
import math as maths
from dataclasses import dataclass, field
from functools import wraps
from os.path import join as joined

log = logging.getLogger("mine")
RATE = 0.5
NAMES = {"b", "a"}
unread = open("/dev/null")


def twice(function):
    @wraps(function)
    def called(config):
        return function(config), function(config)

    return called


@dataclass
class Settings:
    rate: float = RATE
    names: list[str] = field(default_factory=lambda: sorted(NAMES))
"""

SECOND = """\
half = lambda x: x / 2


class Base:
    def other(self):
        return Derived


class Derived(Base):
    def value(self) -> unread:
        return half(Settings().rate)


@twice
def train(config: unread, *, root="a"):
    # as it is written
    log.info("begins")
    return [joined(root, each) for each in Settings().names], Base().other()().value(), maths.pi, json.dumps(config)
"""


class Notebook:
    """Runs cells as a notebook does: the module is `__main__`, and each cell's source is known by a name of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.module = types.ModuleType("__main__")
        patch.setitem(sys.modules, "__main__", self.module)
        self.number = 0

    def run(self, cell: str) -> Any:
        self.number += 1
        name = f"/nowhere/ipykernel_1/{self.number}.py"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), vars(self.module))
        return self.module


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    yield Notebook(monkeypatch)
    for name in [each for each in linecache.cache if each.startswith("/nowhere/")]:
        del linecache.cache[name]


def captured(function: Any, folder: Path) -> UserCode:
    return capture(GivenCode(folder, "given").target(function), folder)


def test_function_of_cells_travels_with_all_it_reaches(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(FIRST)
    train = notebook.run(SECOND).train
    code = captured(train, tmp_path)
    assert code.load()({"a": 1}) == train({"a": 1})
    assert code.target == "given/train.py:train"
    text = (tmp_path / "given" / "train.py").read_text()
    assert "# as it is written" in text and "unread =" not in text


def test_key_changes_with_what_is_reached_only(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(FIRST)
    first = captured(notebook.run(SECOND).train, tmp_path)
    notebook.run("other = 3\n\ndef unrelated(): return other\n")
    assert captured(notebook.run(SECOND.replace("as it is", "as it was")).train, tmp_path).digest == first.digest
    notebook.run(FIRST.replace("RATE = 0.5", "RATE = 0.25"))
    changed = captured(notebook.run(SECOND).train, tmp_path)
    assert {name for name in changed.reached if changed.reached[name] != first.reached[name]} == {"given/train.py:RATE"}


def make(rate: float, scale: Any) -> Any:
    def train(config: dict[str, Any]) -> Any:
        return scale(config["x"]) * rate + len(SECOND), threading.current_thread().name

    return train


def test_closure_travels_with_its_values(tmp_path: Path) -> None:
    given = GivenCode(tmp_path, "given")
    more = lambda x: x + 1  # noqa: E731
    functions = [make(2.0, more), make(3.0, lambda x: x - 1)]
    targets = [given.target(each) for each in functions]
    assert targets == ["given/train.py:train", "given/train1.py:train"] == [given.target(each) for each in functions]
    assert [capture(each, tmp_path).load()({"x": 4}) for each in targets] == [each({"x": 4}) for each in functions]


def test_default_travels_as_the_value_that_was_given(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run(
        "N = 3\n\ndef train(config, n=N * 2, act=len, *, m=(1, 2), best=float('inf')):\n    return n, m, act(m)\n"
    )
    assert captured(cell.train, tmp_path).load()({}) == (6, (1, 2), 2)
    net = "class Net:\n    width = 1\n    def __init__(self, hidden=N, *, width=width):\n        self.has = hidden, width\n"
    cell = notebook.run(net)
    notebook.run("N = 5\nwidth = 7\n")
    assert captured(cell.train, tmp_path).load()({}) == (6, (1, 2), 2)
    assert captured(cell.Net, tmp_path).load()().has == (3, 1)
    cell = notebook.run("def make(n):\n    def inner(config, n=n):\n        return n\n    return inner\nmade = make(2)\n")
    assert captured(cell.made, tmp_path).load()({}) == 2


def test_default_that_cannot_be_written_is_refused(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run("class One: pass\ndef train(config, one=One(), loss=One):\n    return one\n")
    with pytest.raises(SpecError, match=r"train has a default, One\(\), of another time or place"):
        captured(cell.train, tmp_path)
    cell = notebook.run("class Two: pass\nclass Net:\n    def run(self, two=Two):\n        return two\n")
    assert captured(cell.Net, tmp_path).load()().run().__name__ == "Two"
    notebook.run("class Two: pass\n")
    with pytest.raises(SpecError, match=r"Net\.run has a default, Two, of another"):
        captured(cell.Net, tmp_path)


def test_secret_of_environment_is_written_to_no_file(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_API_TOKEN", "verysecretvalue")
    cell = "import os\nTOKEN = {'mine': os.environ['MINE_API_TOKEN']}\n"
    reads = notebook.run(f"{cell}def reads(config): return TOKEN\n").reads
    default = notebook.run(f"{cell}def default(config, mine=os.environ['MINE_API_TOKEN']): return mine\n").default
    url = notebook.run("URL = 'postgresql://me:mypassword@host/db'\ndef url(config): return URL\n").url
    for function, which in ((reads, "reads 'TOKEN'"), (default, r"has a default, os\.environ"), (url, "reads 'URL'")):
        with pytest.raises(SpecError, match=f"{which}.* looks like a secret, and is recorded") as refused:
            captured(function, tmp_path)
        assert "verysecretvalue" not in str(refused.value) and "mypassword" not in str(refused.value)
    with pytest.raises(SpecError, match=r"spec\.train\.params\.mine holds a value which looks like a secret"):
        GivenCode(tmp_path, "given").plain({"train": {"params": {"mine": "verysecretvalue"}}})
    assert not list(tmp_path.rglob("*.*"))


CLASS = """\
from abc import ABC
from dataclasses import dataclass
from enum import Enum
import contextlib

BASE = 3
act = lambda x: x
class Above: lr = 1

@dataclass
class Cfg(Above):
    width: int = BASE
    depth: int = 2

class Kind(Enum):
    RED = 1

class Net(ABC, Above):
    size, act, kind, kinds = 1, act, Kind.RED, [*Kind]
    base = BASE
    same = base
    free: int

    class Inner:
        base = BASE

    def forward(self):
        return Cfg().width, self.base, self.Inner.base, self.__own()

    def __own(self):
        return self.more

    @property
    def more(self):
        return 4

    @more.setter
    def more(self, value):
        pass

    @staticmethod
    @contextlib.contextmanager
    def opened():
        yield 1
"""


def test_class_that_is_as_written_travels(notebook: Notebook, tmp_path: Path) -> None:
    net = captured(notebook.run(CLASS).Net, tmp_path).load()()
    assert net.forward() == (3, 3, 3, 4)


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("BASE = 4", "(Net|Cfg|Inner) is not as .* now: (base|width)"),
        ("Cfg.depth = 5", "Cfg is not as its source gives it now: depth"),
        ("Cfg.lr = 0.5", "Cfg is not .*: lr"),
        ("Net.lr = 0.5", "Net is not .*: lr"),
        ("Net.free = 1", "Net is not .*: free"),
        ("Net.Inner.base = 4", r"Net\.Inner is not .*: base"),
        ("def new(self): return 1\nNet.forward = new", "Net is not .*: forward"),
        ("def new(self): return 1\nNet.more = property(new)", "Net is not .*: more"),
        ("def new(self): return 1\nNet.__call__ = new", "Net is not .*: __call__"),
        ("Net.forward = Net._Net__own", "Net is not .*: forward"),
        ("class Above: lr = 2", "(Net|Cfg) is not .*: Above"),
    ],
)
def test_class_that_was_changed_is_refused(cell: str, shown: str, notebook: Notebook, tmp_path: Path) -> None:
    net = notebook.run(CLASS).Net
    notebook.run(cell)
    with pytest.raises(SpecError, match=shown):
        captured(net, tmp_path)


@pytest.mark.parametrize(
    "body", ["class train:\n        width = size", "@deco(size)\n    def train(config): pass", "class train(size): pass"]
)
@pytest.mark.parametrize("above", ["size = object\n", ""])
def test_local_of_the_function_around_is_refused(above: str, body: str, notebook: Notebook, tmp_path: Path) -> None:
    wraps = "import functools\ndef deco(size): return lambda f: functools.wraps(f)(lambda c: f(c))\n"
    made = notebook.run(f"{wraps}{above}def make(size):\n    {body}\n    return train\nmade = make(int)\n").made
    with pytest.raises(
        SpecError, match=r"train needs 'size', .* variable of the function around it|not as its source gives it now: size"
    ):
        captured(made, tmp_path)


def test_named_tuples_travel_with_their_defaults(notebook: Notebook, tmp_path: Path) -> None:
    pairs = "class Bare(NamedTuple):\n    a: int\n    b: int = N\nclass Pair(Bare):\n    def both(self): return sum(self)\n"
    more = "class Own(NamedTuple):\n    a: int\n    def twice(self):\n        return 2 * self.a\n"
    train = "def train(config):\n    return Bare(1), Pair(1).both(), Own(2).twice()\n"
    cell = notebook.run(f"from typing import NamedTuple\nN = 3\n{pairs}{more}{train}")
    assert captured(cell.train, tmp_path).load()({}) == ((1, 3), 4, 4)
    cell = notebook.run("N = 4\n")
    with pytest.raises(SpecError, match="Bare is not as its source gives it now: b"):
        captured(cell.train, tmp_path)


def test_name_that_is_not_there_is_refused(notebook: Notebook, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"train needs 'absent', .* not defined"):
        captured(notebook.run("def train(config):\n    return absent\n").train, tmp_path)
    captured(notebook.run("async def train(config: absent) -> absent:\n    pass\n").train, tmp_path)


def test_none_and_submodules_travel(notebook: Notebook, tmp_path: Path) -> None:
    cell = notebook.run(
        "import email.mime.text\nnone = None\ndef train(config):\n    return none, email.mime.text.MIMEText('a')\n"
    )
    code = captured(cell.train, tmp_path)
    assert "import email.mime.text\n" in (tmp_path / "given" / "train.py").read_text()
    assert code.load()({})[0] is None


def test_refusals_name_the_way_on(notebook: Notebook, tmp_path: Path) -> None:
    bare = "def deco(f):\n    def called(config): return f(config)\n    return called\n@deco\ndef train(config): return 1\n"
    with pytest.raises(SpecError, match="two different things") as refused:
        captured(notebook.run(bare).train, tmp_path)
    assert "@functools.wraps" in str(refused.value.next_step)
    cell = notebook.run("held = open('/dev/null')\ndef predict(x): return held\ndef run(config): return 1\n")
    with pytest.raises(SpecError, match="predict goes into the file of run") as refused:
        GivenCode(tmp_path, "given").target(cell.run, is_loop=True)
    assert "rename predict" in str(refused.value.next_step)


def test_run_keeps_its_code_when_another_program_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {"name": "same", "data": {"label": "y"}, "train": {"recipe": "linear", "epochs": 3}}
    rows = {"train": {"x": [1, 2], "y": [0, 1]}}

    def first(config: dict[str, Any]) -> int:
        return 1

    looped = {**spec, "train": {}}
    one = load_given(looped, train_func=first, data=rows)
    assert one.project.recipe.target == ".penstock/given/same/first.py:first"
    two = load_given(spec, data=rows)
    assert one.file == two.file and one.file.read_text() == two.text != one.text
    kept = _given_files(one)
    assert kept[".penstock/given/same.yaml"].decode() == one.text
    assert b"return 1" in kept[".penstock/given/same/first.py"]


def test_failed_rows_leave_the_earlier_spec_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = {"name": "kept", "data": {"label": "y"}, "train": {"recipe": "linear"}}
    good = load_given(spec, data={"train": {"x": [1], "y": [0]}})
    written = good.file.read_bytes()
    with pytest.raises(DataError):
        load_given(spec, data={"train": object()})
    assert good.file.read_bytes() == written
    with pytest.raises(SpecError, match=r"spec\.train is not a dict: None"):
        load_given({**spec, "train": None}, train_func=make(1.0, len))
    with pytest.raises(SpecError, match="spec has 1 problem") as wrong:
        load_given({**spec, "train": {"recipe": "linear", "epochs": 0}}, data={"train": {"x": [1], "y": [0]}})
    assert [line.partition(": 0: ")[0] for line in wrong.value.problems] == ["spec: train.epochs"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (threading.Lock(), "lock"),
        (np.zeros(9), "numpy.ndarray"),
        (open("/dev/null"), "TextIOWrapper"),  # noqa: SIM115
        ("x" * 200_000, "str of 200,002 characters"),
        (float("nan"), "float, nan"),
        ([1, object()], "list"),
    ],
)
def test_value_that_cannot_travel_is_refused_by_name(value: Any, shown: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=rf"train -> scale reads 'value'.*{shown}") as refused:
        captured(make(1.0, lambda x: (x, value)), tmp_path)
    assert "train.params" in str(refused.value.next_step) and "data=" in str(refused.value.next_step)


def test_code_without_source_is_refused(notebook: Notebook, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("act = lambda x: x\ndef train(config): return act(1)", names)
    for given, shown in [
        (names["act"], "has no source"),
        (make(1.0, names["train"]), "train -> scale has no source"),
        (make(1.0, print).__call__, "has no definition of its own"),
    ]:
        with pytest.raises(SpecError, match=shown):
            captured(given, tmp_path)
    cell = "import functools\nplain = lambda f: functools.wraps(f)(lambda config: f(config))\ndef inner(config): return 1\n"
    wrapped = notebook.run(f"{cell}\nwrapped = plain(inner)").wrapped
    with pytest.raises(SpecError, match="wrapper that is not written as a decorator"):
        captured(wrapped, tmp_path)


def test_one_name_for_two_things_is_refused(notebook: Notebook, tmp_path: Path) -> None:
    outer = "def outer():\n    lambda_function = 1\n    return lambda config: lambda_function\nmade = outer()\n"
    with pytest.raises(SpecError, match="two different things that are called 'lambda_function'"):
        captured(notebook.run(outer).made, tmp_path)
    with pytest.raises(SpecError, match="two different things that are called 'rate'"):
        captured(make(1.0, make(2.0, len)), tmp_path)


SCRIPT = """\
import sys
from pathlib import Path
import helpers
from helpers import Net
from penstock.flows.given.code import GivenCode

N = 3

def train(config):
    return Net().n * N + helpers.one()

print(GivenCode(Path(sys.argv[1]), "given").target(train))
print(GivenCode(Path(sys.argv[1]), "given").target(Net))
"""


def test_script_imports_files_of_the_project_and_no_others(tmp_path: Path) -> None:
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "helpers.py").write_text("class Net:\n    n = 7\n\ndef one():\n    return 1\n")
    (scripts / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(scripts / "train.py"), str(tmp_path / "project")], capture_output=True, text=True
    )
    assert done.stdout.split() == ["given/train.py:train", "scripts/helpers.py:Net"], done.stderr
    assert capture("given/train.py:train", tmp_path / "project").load()({}) == 22
    other = subprocess.run([sys.executable, str(scripts / "train.py"), str(tmp_path)], capture_output=True, text=True)
    assert other.stdout.split()[1] == "project/scripts/helpers.py:Net"
    (tmp_path / "elsewhere").mkdir()
    refused = subprocess.run(
        [sys.executable, str(scripts / "train.py"), str(tmp_path / "elsewhere")], capture_output=True, text=True
    )
    assert "train imports helpers, which does not travel" in refused.stderr


def test_spec_as_dict_names_code_and_starts_in_the_working_folder(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = notebook.run("class Net:\n    pass\n\nclass Stop:\n    pass\n\ndef scale(batch):\n    return batch\n")
    spec = {
        "name": "cells",
        "data": {"format": "parquet", "train": Path("rows") / "a.parquet", "label": "y"},
        "preprocess": [{"map_batches": {"function": cell.scale}}],
        "train": {"recipe": cell.Net, "params": {"size": np.int64(3)}, "callbacks": [{cell.Stop: {"patience": 3}}]},
    }
    loaded = load_spec(spec)
    assert loaded.base_dir == tmp_path and loaded.spec.storage == str(tmp_path / ".penstock")
    assert loaded.spec.train.recipe == ".penstock/given/cells/Net.py:Net"
    assert loaded.spec.train.named_callbacks == [(".penstock/given/cells/Stop.py:Stop", {"patience": 3})]
    assert [*loaded.project.transforms] == [".penstock/given/cells/scale.py:scale"]
    again = load_spec(tmp_path / ".penstock" / "given" / "cells.yaml")
    assert again.spec == loaded.spec and again.base_dir == tmp_path
    for wrong, shown in [({"size": cell.scale}, r"spec\.train\.params\.size is a function"), ({"x": object()}, "is a object")]:
        with pytest.raises(SpecError, match=shown):
            load_spec({**spec, "train": {"recipe": cell.Net, "params": wrong}})
    with pytest.raises(SpecError) as refused:
        load_spec({**spec, "nmae": 1})
    assert refused.value.next_step == "correct the spec that the program gives"


def test_train_func_and_rows_take_the_place_of_the_files(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = notebook.run("def load_model(folder, config):\n    return 1\n\ndef train(config):\n    return 2\n")
    for spec in ({"name": "given", "data": {"label": "y"}}, tmp_path / "given.yaml"):
        (tmp_path / "given.yaml").write_text("name: given\ndata: {label: y}\ntrain: {}\n")
        loaded = load_given(spec, ["train.params={a: 1}"], cell.train, {"train": {"x": [1], "y": [0]}})
        assert loaded.spec.train.loop == ".penstock/given/given/train.py:train"
        assert [file.location for file in loaded.project.files] == ["train"]
        module = sys.modules[loaded.project.recipe.load().__module__]
        assert module.train({}) == 2 and module.load_model("", {}) == 1
        assert loaded.spec.train.params == {"a": 1}
    whole = load_spec(tmp_path / ".penstock" / "given" / "given.yaml")
    assert whole.spec.data == loaded.spec.data and whole.spec.train.loop == loaded.spec.train.loop
    for wrong in ({"test": {"x": [1]}}, {"train": {"x": [1]}, "val": {"x": [1]}, "valid": {"x": [1]}}):
        with pytest.raises(SpecError, match=r"data=\{\.\.\.\} has .*; it takes train, and optionally"):
            load_given({"name": "given"}, data=wrong)


def test_datasets_of_any_name_come_from_the_program(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = notebook.run("def train(config):\n    return 2\n").train
    rows = {name: {"x": [number], "y": [0]} for number, name in enumerate(("train", "valid", "extra"))}
    (tmp_path / "given.yaml").write_text("name: given\ndata: {label: y, datasets: {other: more.csv}}\ntrain: {}\n")
    of_dict = {"name": "given", "data": {"label": "y", "datasets": {"other": "more.csv"}}}
    (tmp_path / "more.csv").write_text("x,y\n1,0\n")
    for spec in (of_dict, tmp_path / "given.yaml"):
        data = load_given(spec, train_func=train, data=rows).spec.data
        assert {*data.datasets} == {"other", "extra"} and str(data.validation).endswith("/rows")
        assert ipc_of(data.datasets["extra"]) == [2] and ipc_of(str(data.validation)) == [1]
    assert load_spec(tmp_path / ".penstock" / "given" / "given.yaml").spec.data == data, "the file of a dict has them, too"
    with pytest.raises(SpecError, match=r"data\.datasets: 'no-name'"):
        load_given(of_dict, train_func=train, data={**rows, "no-name": rows["extra"]})
    with pytest.raises(SpecError, match="only a function"):
        load_given({**of_dict, "train": {"recipe": "a.py:A"}}, data=rows)


def ipc_of(folder: str) -> list[int]:
    return ds.dataset(folder, format="ipc").to_table()["x"].to_pylist()
