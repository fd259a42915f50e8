"""User code is read without being run, keyed by what it reaches, and importable in any process under any folder name."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest

from penstock import installed
from penstock.errors import SpecError
from penstock.usercode.capture import UserCode, UserCodeError, capture
from penstock.usercode.files import CodeSpec, matched_files
from tests import ROOT

Files = dict[str, str]


def write(root: Path, files: Files) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(textwrap.dedent(text))
    return root


def digest_after(root: Path, target: str, change: Files) -> tuple[str, str]:
    """The digest before and after some files are replaced."""
    before = capture(target, root).digest
    write(root, change)
    return before, capture(target, root).digest


PROJECT: Files = {
    "model.py": """
        '''A model.'''
        from helpers import scale
        import tools.shapes as shapes
        SIZE = 3

        class Base:
            pass

        class Classifier(Base):
            '''Doc.'''
            def run(self, x):  # comment
                return scale(x) * SIZE + shapes.width()

        def unrelated():
            return 1
        """,
    "helpers.py": """
        from deeper import FACTOR

        def scale(x):
            return x * FACTOR

        def other():
            return 0
        """,
    "deeper.py": "FACTOR = 2\nUNUSED = 5\n",
    "tools/__init__.py": "",
    "tools/shapes.py": "def width():\n    return 10\n\ndef height():\n    return 20\n",
}

TARGET = "model.py:Classifier"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path / "project", PROJECT)


def changed(path: str, old: str, new: str) -> Files:
    text = textwrap.dedent(PROJECT[path])
    assert old in text
    return {path: text.replace(old, new)}


def test_loading_twice_gives_the_same_object(project: Path) -> None:
    code = capture(TARGET, project)
    assert code.load()().run(4) == 4 * 2 * 3 + 10
    assert code.load() is code.load()
    assert pickle.loads(pickle.dumps(code)).load() is code.load()
    assert UserCode.model_validate_json(code.model_dump_json()) == code


def test_capture_runs_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"model.py": "import boom\nclass A: pass\n", "boom.py": "raise RuntimeError('ran')\n"})
    code = capture("model.py:A", tmp_path)
    with pytest.raises(UserCodeError, match=r"boom.py:1: RuntimeError: ran"):
        code.load()


def test_missing_package_error_names_install_command(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import no_such_package\nf = 1\n")
    with pytest.raises(UserCodeError, match=r"m\.py:1: ModuleNotFoundError") as caught:
        capture("m.py:f", tmp_path).load()
    assert "pip install no_such_package" in caught.value.next_step


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("helpers.py", "x * FACTOR", "x * FACTOR + 1"),
        ("deeper.py", "FACTOR = 2", "FACTOR = 3"),
        ("tools/shapes.py", "10", "11"),
        ("model.py", "SIZE = 3", "SIZE = 4"),
        ("model.py", "class Base:\n    pass", "class Base:\n    x = 1"),
        ("model.py", "* SIZE", "* SIZE * 1"),
        ("helpers.py", "from deeper import FACTOR", "import deeper\nprint(deeper.FACTOR)\nfrom deeper import FACTOR"),
        ("tools/__init__.py", "", "import os\nos.environ.setdefault('A', 'b')\n"),
    ],
)
def test_change_of_reached_code_changes_digest(project: Path, path: str, old: str, new: str) -> None:
    before, after = digest_after(project, TARGET, changed(path, old, new))
    assert before != after


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("model.py", "# comment", "# another comment"),
        ("model.py", "'''Doc.'''", "'''Other.'''"),
        ("model.py", "'''A model.'''", "\n\n# moved down\n\n"),
        ("model.py", "return 1", "return 2"),
        ("helpers.py", "return 0", "return 9"),
        ("helpers.py", "def other():", "def another():"),
        ("deeper.py", "UNUSED = 5", "UNUSED = 6"),
        ("tools/shapes.py", "20", "21"),
        ("helpers.py", "return x * FACTOR", "return (x  *  FACTOR)  # same"),
        ("model.py", "def unrelated():", "if __name__ == '__main__':\n    print(1)\ndef unrelated():"),
    ],
)
def test_change_of_unreached_code_keeps_digest(project: Path, path: str, old: str, new: str) -> None:
    before, after = digest_after(project, TARGET, changed(path, old, new))
    assert before == after


def test_digest_is_independent_of_folder(tmp_path: Path) -> None:
    one, two = (capture(TARGET, write(tmp_path / name, PROJECT)) for name in ("one", "two"))
    assert one.digest == two.digest
    assert one.files == two.files


def test_digest_ignores_order_of_definitions(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def a():\n    return b()\ndef b():\n    return 1\n"})
    before, after = digest_after(tmp_path, "m.py:a", {"m.py": "def b():\n    return 1\ndef a():\n    return b()\n"})
    assert before == after


def test_attributes_of_imported_module_count_singly(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "m.py": "import helpers\ndef f():\n    return helpers.g()\n",
            "helpers.py": "def g():\n    return 1\ndef h():\n    return 2\n",
        },
    )
    before, after = digest_after(tmp_path, "m.py:f", {"helpers.py": "def g():\n    return 1\ndef h():\n    return 3\n"})
    assert before == after
    before, after = digest_after(tmp_path, "m.py:f", {"helpers.py": "def g():\n    return 5\ndef h():\n    return 3\n"})
    assert before != after
    assert capture("m.py:f", tmp_path).load()() == 5


@pytest.mark.parametrize(
    "source",
    [
        "from helpers import *\ndef f():\n    return g()\n",
        "import helpers\ndef f():\n    return getattr(helpers, 'g')()\n",
        "import importlib\ndef f():\n    return importlib.import_module('helpers').g()\n",
        "def f():\n    import helpers as other\n    return vars(other)['g']()\n",
    ],
)
def test_untraceable_name_counts_whole_module(tmp_path: Path, source: str) -> None:
    write(tmp_path, {"m.py": source, "helpers.py": "def g():\n    return 1\ndef h():\n    return 2\n"})
    before, after = digest_after(tmp_path, "m.py:f", {"helpers.py": "def g():\n    return 1\ndef h():\n    return 3\n"})
    assert before != after
    assert capture("m.py:f", tmp_path).load()() == 1


@pytest.mark.parametrize(
    "word",
    [
        *("globals()['h']", "eval('h')", "vars()", "sys.modules[__name__].h()", "getattr(sys.modules[__name__], 'h')()"),
        *("ME.h()", "inspect.getmodule(f).h()", "builtins.eval('h')", "f.__globals__['h']()"),
    ],
)
def test_dynamic_lookup_counts_its_module(tmp_path: Path, word: str) -> None:
    source = f"import sys, inspect, builtins\nME = sys.modules[__name__]\ndef f():\n    return {word}\ndef h():\n    return 1\n"
    write(tmp_path, {"m.py": source})
    before, after = digest_after(tmp_path, "m.py:f", {"m.py": source.replace("return 1", "return 2")})
    assert before != after


@pytest.mark.parametrize(
    ("names", "use"),
    [
        ("from sys import modules", "modules[__name__].h()"),
        ("import sys as s", "s.modules[__name__].h()"),
        ("from builtins import eval as e", "e('h')"),
        ("from inspect import getmodule as g", "g(f).h()"),
        ("import sys", "sys._getframe().f_globals['h']()"),
        ("from importlib import import_module as im", "im('m').h()"),
    ],
)
def test_dynamic_lookup_by_another_name_counts_its_module(tmp_path: Path, names: str, use: str) -> None:
    source = f"{names}\ndef f():\n    return {use}\ndef h():\n    return 1\n"
    write(tmp_path, {"m.py": source})
    before, after = digest_after(tmp_path, "m.py:f", {"m.py": source.replace("return 1", "return 2")})
    assert before != after


@pytest.mark.parametrize("made", ["from torch import library as t\n@t.impl('a')", "import torch\n@torch.x.register_kl('a')"])
def test_function_that_a_library_keeps_counts(tmp_path: Path, made: str) -> None:
    source = f"{made}\ndef h():\n    return 1\ndef f():\n    return 0\n"
    write(tmp_path, {"m.py": source})
    before, after = digest_after(tmp_path, "m.py:f", {"m.py": source.replace("return 1", "return 2")})
    assert before != after


def test_imports_inside_functions_count(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def f():\n    from helpers import g\n    return g()\n", "helpers.py": "def g():\n    return 1\n"})
    before, after = digest_after(tmp_path, "m.py:f", {"helpers.py": "def g():\n    return 2\n"})
    assert before != after
    assert capture("m.py:f", tmp_path).load()() == 2


def test_decorators_and_base_classes_in_other_files_count(tmp_path: Path) -> None:
    imports = "from deco import twice\nfrom base import Base\n"
    files = {
        "m.py": imports + "class A(Base):\n    @twice\n    def f(self):\n        return 1\n",
        "deco.py": "def twice(fn):\n    return lambda self: 2 * fn(self)\n",
        "base.py": "class Base:\n    k = 1\n",
    }
    write(tmp_path, files)
    assert capture("m.py:A", tmp_path).load()().f() == 2
    before, after = digest_after(tmp_path, "m.py:A", {"deco.py": files["deco.py"].replace("2 *", "3 *")})
    assert before != after
    before, after = digest_after(tmp_path, "m.py:A", {"base.py": files["base.py"].replace("k = 1", "k = 2")})
    assert before != after


def test_self_registering_definition_counts_unnamed(tmp_path: Path) -> None:
    files = {
        "m.py": "import plugins\nfrom registry import REGISTRY\ndef f():\n    return REGISTRY['a']()\n",
        "registry.py": "REGISTRY = {}\ndef register(fn):\n    REGISTRY[fn.__name__] = fn\n    return fn\n",
        "plugins.py": "from registry import register\n@register\ndef a():\n    return 1\n",
    }
    write(tmp_path, files)
    before, after = digest_after(tmp_path, "m.py:f", {"plugins.py": files["plugins.py"].replace("return 1", "return 2")})
    assert before != after
    assert capture("m.py:f", tmp_path).load()() == 2


@pytest.mark.parametrize(
    "expression", ["Path(__file__).parent / 'data' / 'words.txt'", "Path(__file__).parent.joinpath('data/words.txt')"]
)
def test_data_file_named_by_literal_counts_and_travels(tmp_path: Path, expression: str) -> None:
    source = f"from pathlib import Path\ndef f():\n    return ({expression}).read_text()\n"
    write(tmp_path, {"m.py": source, "data/words.txt": "one"})
    code = capture("m.py:f", tmp_path)
    before, after = digest_after(tmp_path, "m.py:f", {"data/words.txt": "two"})
    assert before != after
    assert code.load()() == "one"
    assert capture("m.py:f", tmp_path).load()() == "two"


@pytest.mark.parametrize(
    "file",
    [
        *(
            ".env",
            ".env.prod",
            "prod.env",
            ".netrc",
            ".pgpass",
            "id_rsa",
            "server.pem",
            "tls.key",
            "kubeconfig",
            "secrets.yaml",
        ),
        *(
            "credentials",
            "conf/credentials.json",
            ".aws/config",
            ".kube/config",
            "service-account-7.json",
            "client_secret.json",
        ),
    ],
)
def test_secret_file_is_refused_with_next_step(tmp_path: Path, file: str) -> None:
    write(tmp_path, {"m.py": f"from pathlib import Path\ndef f():\n    return Path({file!r}).read_text()\n", file: "canary"})
    with pytest.raises(UserCodeError, match=r"m\.py names .*, a file of secrets") as caught:
        capture("m.py:f", tmp_path)
    assert file in caught.value.message
    assert "environment variable" in caught.value.next_step


def test_secret_behind_link_or_other_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def f():\n    return open('conf.txt').read()\n", ".env": "canary"})
    (tmp_path / "conf.txt").symlink_to(".env")
    with pytest.raises(UserCodeError, match="a file of secrets"):
        capture("m.py:f", tmp_path)
    (tmp_path / "conf.txt").unlink()
    (tmp_path / "conf.txt").write_text('{"private_key": "-----BEGIN PRIVATE KEY-----\\ncanary"}')
    with pytest.raises(UserCodeError, match=r"m\.py:f names conf\.txt, a file of secrets"):
        capture("m.py:f", tmp_path)


def test_harmless_file_names_are_accepted(tmp_path: Path) -> None:
    source = "import credentials\ndef f():\n    return credentials.X, '.env', open('keys.txt').read(), 'environment.yml'\n"
    write(tmp_path, {"m.py": source, "credentials.py": "X = 1\n", "keys.txt": "k", "environment.yml": "e"})
    code = capture("m.py:f", tmp_path)
    assert code.shipped == {"m.py": len(source), "credentials.py": 6, "keys.txt": 1, "environment.yml": 1}


def test_source_data_counts_but_does_not_travel(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def f():\n    return 'train.csv', 'words.txt'\n", "train.csv": "a", "words.txt": "b"})
    code = capture("m.py:f", tmp_path, is_source=lambda file: file == (tmp_path / "train.csv").resolve())
    assert code.shipped.keys() == {"m.py", "words.txt"}
    assert code.reached.keys() == {"m.py:f", "words.txt", "train.csv"}


CLASHING: Files = {
    "training/blocks.py": "def name():\n    return 'user block'\n",
    "tasks/__init__.py": "from .inner import VALUE\n",
    "tasks/inner.py": "VALUE = 'user task'\n",
    "penstock/__init__.py": "",
    "penstock/errors.py": "class PenstockError(Exception):\n    mine = True\n",
    "ingest.py": "def read():\n    return 'user ingest'\n",
    "json.py": "NAME = 'user json'\n",
    "model.py": """
        import importlib
        import ingest
        import json
        import penstock.errors
        import training.blocks
        import training.blocks as aliased
        from penstock.errors import PenstockError
        from tasks import VALUE
        from training import blocks
        from penstock.training.spec import TrainSpec

        class Model:
            def facts(self):
                late = importlib.import_module('training.blocks')
                return [
                    ingest.read(), json.NAME, VALUE, blocks.name(), training.blocks.name(), aliased.name(), late.name(),
                    PenstockError.mine, penstock.errors.PenstockError is PenstockError, TrainSpec.__module__,
                ]
        """,
}


def test_project_with_penstocks_folder_names_uses_own_files(tmp_path: Path) -> None:
    import json

    import penstock.errors
    import penstock.ingest.spec
    import penstock.training.spec

    code = capture("model.py:Model", write(tmp_path, CLASHING))
    block, task = "user block", "user task"
    assert code.load()().facts() == [
        "user ingest", "user json", task, block, block, block, block, True, True, "penstock.training.spec",
    ]  # fmt: skip
    assert not hasattr(penstock.errors.PenstockError, "mine")
    assert sys.modules["json"] is json
    assert sys.modules["penstock.ingest.spec"] is penstock.ingest.spec
    assert sys.modules["penstock.training.spec"] is penstock.training.spec


def test_target_in_clashing_folder_or_dotted_module_loads(tmp_path: Path) -> None:
    write(tmp_path, CLASHING)
    assert capture("training/blocks.py:name", tmp_path).load()() == "user block"
    assert capture("training.blocks:name", tmp_path).load() is capture("training/blocks.py:name", tmp_path).load()


def test_relative_imports_and_neighbours_work(tmp_path: Path) -> None:
    files = {
        "nets/model.py": "from .blocks import a\nfrom . import blocks\nfrom ..top import t\nimport beside_only\n"
        "def f():\n    return a() + blocks.a() + t() + beside_only.n()\n",
        "nets/blocks.py": "def a():\n    return 1\n",
        "nets/beside_only.py": "def n():\n    return 100\n",
        "top.py": "def t():\n    return 10\n",
    }
    code = capture("nets/model.py:f", write(tmp_path, files))
    assert code.load()() == 112
    before, after = digest_after(tmp_path, "nets/model.py:f", {"top.py": "def t():\n    return 20\n"})
    assert before != after
    before, after = digest_after(tmp_path, "nets/model.py:f", {"nets/beside_only.py": "def n():\n    return 200\n"})
    assert before != after


def test_equal_names_of_two_projects_load_in_one_process(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(
            tmp_path / name, {"model.py": "import helpers\ndef f():\n    return helpers.N\n", "helpers.py": f"N = '{name}'\n"}
        )
    assert [capture("model.py:f", tmp_path / name).load()() for name in ("one", "two")] == ["one", "two"]


def test_folder_of_scripts_keeps_installed_package(tmp_path: Path) -> None:
    source = "import numpy\nfrom numpy import arange\ndef f():\n    return numpy.sum(arange(3))\n"
    files = {"numpy/convert.py": "X = 1\n", "m.py": source}
    code = capture("m.py:f", write(tmp_path, files))
    assert int(code.load()()) == 3
    assert "numpy" in code.versions


def test_versions_hold_imports_of_reached_code(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"m.py": "import numpy as np\nimport matplotlib\ndef f():\n    return np.ones(1)\ndef g():\n    return matplotlib\n"},
    )
    versions = capture("m.py:f", tmp_path).versions
    assert set(versions) == {"numpy"}
    assert versions["numpy"].split(".")[0].isdigit()


def test_module_without_distribution_counts_by_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "path", {"loose_module.py": "X = 1\n"})
    write(tmp_path / "project", {"m.py": "import loose_module\ndef f():\n    return loose_module.X\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    assert capture("m.py:f", tmp_path / "project").versions["loose_module"].startswith("source:")


def test_remains_of_cut_off_upgrade_give_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"installed_{letter}" for letter in "abcdefgh"]
    for name in names:
        for folder, version in ((name, "2.0"), (f"~{name[1:]}", "1.0")):
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            write(tmp_path / "path" / f"{folder}-{version}.dist-info", {"METADATA": metadata, "top_level.txt": name})
        write(tmp_path / "path", {f"{name}.py": "X = 1\n"})
    uses = "".join(f"import {name}\n" for name in names) + f"def f():\n    return {', '.join(f'{name}.X' for name in names)}\n"
    write(tmp_path / "project", {"m.py": uses})
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    installed._distributions.cache_clear()
    try:
        assert capture("m.py:f", tmp_path / "project").versions == dict.fromkeys(names, "2.0")
    finally:
        installed._distributions.cache_clear()


def test_installed_code_is_named_by_module(tmp_path: Path) -> None:
    code = capture("torch.nn:Linear", tmp_path)
    assert code.files == {}
    assert set(code.versions) == {"torch"}
    assert code.load().__name__ == "Linear"


def test_other_process_in_other_folder_loads_code(project: Path, tmp_path: Path) -> None:
    import ray.cloudpickle

    (tmp_path / "code.pkl").write_bytes(ray.cloudpickle.dumps(capture(TARGET, project)))
    script = (
        "import pickle, sys; code = pickle.load(open(sys.argv[1], 'rb')); "
        "assert 'model' not in sys.modules; print(code.load()().run(4), sys.modules[code.load().__module__].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "code.pkl")],
        cwd="/", env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "34"
    assert not done.stdout.split()[1].startswith(str(project))


def test_torch_modules_and_dataclasses_of_user_code_work(tmp_path: Path) -> None:
    source = """
        from __future__ import annotations
        import dataclasses, typing, torch

        @dataclasses.dataclass
        class Config:
            width: int = 2
            inner: typing.ClassVar[int] = 1

        class Net(torch.nn.Module):
            def __init__(self, config: Config = Config()):
                super().__init__()
                self.config = config
                self.layer = torch.nn.Linear(config.width, 1)
        """
    net = capture("m.py:Net", write(tmp_path, {"m.py": source})).load()
    state = net().state_dict()
    other = net()
    other.load_state_dict(state)
    assert other.state_dict()["layer.weight"].equal(state["layer.weight"])
    assert pickle.loads(pickle.dumps(other)).config == other.config


def test_traceback_shows_users_file_and_line(tmp_path: Path) -> None:
    code = capture(
        "m.py:f", write(tmp_path, {"m.py": "import helpers\n\ndef f():\n    return 1 / 0\n", "helpers.py": "X = 1\n"})
    )
    with pytest.raises(ZeroDivisionError) as caught:
        code.load()()
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == (str(tmp_path / "m.py"), 4, "return 1 / 0")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("modle.py:Classifier", ["modle.py", "did you mean 'model.py'"]),
        ("model.py:Clasifier", ["model.py", "did you mean 'Classifier'"]),
        ("model.py", ["model.py", "path/to/file.py:Name"]),
        ("../model.py:X", ["below"]),
        ("no_such_package.module:X", ["no_such_package.module", "neither"]),
        ("helpers:scal", ["did you mean 'scale'"]),
    ],
)
def test_target_without_definition_is_refused(project: Path, target: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        capture(target, project)
    for word in words:
        assert word in str(caught.value)


def test_syntax_error_names_file_and_line(project: Path) -> None:
    write(project, {"deeper.py": "FACTOR = 2\ndef (:\n"})
    with pytest.raises(UserCodeError, match=r"deeper.py:2"):
        capture(TARGET, project)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_thing\n", r"helpers.py:2: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("import sys\nsys.exit(3)\n", r"helpers.py:3: SystemExit: 3"),
        ("X = 1 / 0\n", r"helpers.py:2: ZeroDivisionError"),
    ],
)
def test_failed_import_names_file_line_and_cause(tmp_path: Path, source: str, words: str) -> None:
    write(tmp_path, {"m.py": "import helpers\ndef f():\n    return 1\n", "helpers.py": f"# {tmp_path}\n{source}"})
    with pytest.raises(UserCodeError, match=words) as caught:
        capture("m.py:f", tmp_path).load()
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), UserCodeError)


def test_cycles_between_files_end(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import b\ndef f():\n    return b.g(0)\n", "b.py": "import a\ndef g(n):\n    return n or g(1)\n"})
    assert capture("a.py:f", tmp_path).load()() == 1


@pytest.mark.parametrize(
    "decorator", ["torch.library.custom_op('my::op', mutates_args=())", "custom_op('my::op', mutates_args=())"]
)
def test_operator_of_torch_library_counts_unnamed(tmp_path: Path, decorator: str) -> None:
    made = f"import torch\nfrom torch.library import custom_op\n@{decorator}\ndef op() -> int:\n    return 1\n"
    write(tmp_path, {"m.py": "import torch, ops\ndef f():\n    return torch.ops.my.op()\n", "ops.py": made})
    before, after = digest_after(tmp_path, "m.py:f", {"ops.py": made.replace("return 1", "return 2")})
    assert before != after


REGISTERING = {
    "__init_subclass__": "class Base:\n    def __init_subclass__(cls, **options):\n        FOUND['a'] = cls\n",
    "a metaclass": "class Meta(type):\n    def __init__(cls, *given):\n        FOUND['a'] = cls\n"
    "class Base(metaclass=Meta):\n    pass\n",
    "__subclasses__": "class Base:\n    pass\n",
}


@pytest.mark.parametrize("how", REGISTERING)
def test_class_found_through_base_counts_unnamed(tmp_path: Path, how: str) -> None:
    found = "Base.__subclasses__()[0]" if how == "__subclasses__" else "FOUND['a']"
    files = {
        "base.py": f"FOUND = {{}}\n{REGISTERING[how]}",
        "nets.py": "import base\nclass Middle(base.Base):\n    pass\nclass Net(Middle):\n    size = 1\n",
        "m.py": f"import nets\nfrom base import FOUND, Base\ndef f():\n    return {found}\n",
    }
    before, after = digest_after(
        write(tmp_path, files), "m.py:f", {"nets.py": files["nets.py"].replace("size = 1", "size = 2")}
    )
    assert before != after


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("Net.a, Net.b = 8, 1", "Net.a, Net.b = 9, 1"),
        ("(SIZES['a'], rest) = 8, 1", "(SIZES['a'], rest) = 9, 1"),
        ("if __name__ != '__main__':\n    Net.a = 8", "if __name__ != '__main__':\n    Net.a = 9"),
        ("if not __name__ == '__main__':\n    Net.a = 8", "if not __name__ == '__main__':\n    Net.a = 9"),
        ("if __name__ == '__main__' or True:\n    Net.a = 8", "if __name__ == '__main__' or True:\n    Net.a = 9"),
        ("class Unused:\n    Net.a = 8", "class Unused:\n    Net.a = 9"),
        ("OTHER = SIZES\nOTHER |= {'a': 8}", "OTHER = SIZES\nOTHER |= {'a': 9}"),
    ],
)
def test_side_effect_of_import_counts(tmp_path: Path, line: str, other: str) -> None:
    source = "SIZES = {}\nclass Net:\n    a = 1\ndef f():\n    return Net.a, SIZES\n"
    write(tmp_path, {"m.py": f"{source}{line}\n"})
    before, after = digest_after(tmp_path, "m.py:f", {"m.py": f"{source}{other}\n"})
    assert before != after
    assert "9" in str(capture("m.py:f", tmp_path).load()())


@pytest.mark.parametrize(
    "unused",
    [
        "class Unused(Base):\n    x = 1",
        "class Unused(torch.nn.Module):\n    x = 1",
        "class Unused(abc.ABC, metaclass=abc.ABCMeta):\n    x = 1",
        "if __name__ == '__main__':\n    Base.k = 1",
    ],
)
def test_unregistered_class_counts_only_if_used(tmp_path: Path, unused: str) -> None:
    source = "import abc\nimport torch\nclass Base:\n    k = 0\nclass A(Base):\n    pass\n"
    write(tmp_path, {"m.py": f"{source}{unused}\n"})
    before, after = digest_after(tmp_path, "m.py:A", {"m.py": f"{source}{unused.replace('1', '2')}\n"})
    assert before == after


@pytest.mark.parametrize(
    "read",
    [
        "open('nets/assets/vocab.txt')",
        "open(HERE / 'assets' / 'vocab.txt')",
        "open(HERE.joinpath('assets', 'vocab.txt'))",
        "open(os.path.join(HERE, 'assets', 'vocab.txt'))",
        "open(f'{HERE}/assets/vocab.txt')",
        "open(VOCAB)",
    ],
)
def test_literal_path_counts_and_travels(tmp_path: Path, read: str) -> None:
    source = "import os\nfrom pathlib import Path\nHERE = Path(__file__).parent\nVOCAB = HERE / 'assets/vocab.txt'\n"
    write(tmp_path, {"nets/m.py": f"{source}def f():\n    return {read}.read()\n", "nets/assets/vocab.txt": "one"})
    assert "nets/assets/vocab.txt" in capture("nets/m.py:f", tmp_path).files
    before, after = digest_after(tmp_path, "nets/m.py:f", {"nets/assets/vocab.txt": "two"})
    assert before != after
    if "HERE" in source + read and not read.startswith("open('"):
        assert capture("nets/m.py:f", tmp_path).load()() == "two"


def test_literal_in_unreached_code_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def f(): ...\ndef g():\n    return open('vocab.txt')\n", "vocab.txt": "one"})
    assert capture("m.py:f", tmp_path).files.keys() == {"m.py"}


def test_file_of_code_files_counts_travels_and_is_found(tmp_path: Path) -> None:
    source = "from pathlib import Path\ndef f(name):\n    return Path(__file__).with_name('words').joinpath(name).read_text()\n"
    write(tmp_path, {"m.py": source, "words/a/one.txt": "one", "words/b.md": "b", "words/.hidden": "h"})
    files = matched_files(tmp_path, ["words/**"])
    assert files == ["words/a/one.txt", "words/b.md"]
    one = capture("m.py:f", tmp_path, files=files)
    assert one.load()("a/one.txt") == "one"
    write(tmp_path, {"words/a/one.txt": "two"})
    two = capture("m.py:f", tmp_path, files=files)
    assert two.digest != one.digest and two.load()("a/one.txt") == "two"
    installed = [capture("json:loads", tmp_path, files=names).digest for names in ((), files)]
    assert len({*installed}) == 2


def test_secret_under_code_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"m.py": "def f(): ...\n", "conf/credentials.json": "{}"})
    with pytest.raises(UserCodeError, match=r"code\.files names conf/credentials\.json, a file of secrets"):
        capture("m.py:f", tmp_path, files=matched_files(tmp_path, ["conf/*"]))


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../other/*", "a/../../b"])
def test_glob_outside_project_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a glob below the folder of the pipeline file"):
        CodeSpec(files=("ok/*", pattern))


def test_file_with_absolute_path_counts_and_stays(tmp_path: Path) -> None:
    write(tmp_path, {"elsewhere/vocab.txt": "one"})
    vocab = tmp_path / "elsewhere" / "vocab.txt"
    write(tmp_path / "p", {"m.py": f"def f():\n    return open('{vocab}').read()\n"})
    assert capture("m.py:f", tmp_path / "p").files.keys() == {"m.py"}
    before, after = digest_after(tmp_path / "p", "m.py:f", {str(vocab): "two"})
    assert before != after


@pytest.mark.parametrize("written", ["assets/vocab.txt", "./assets/vocab.txt", "{folder}/assets/vocab.txt"])
def test_file_named_by_params_counts_and_travels(tmp_path: Path, written: str) -> None:
    write(tmp_path, {"m.py": "def f(files, rate):\n    return open(files['vocab']).read()\n", "assets/vocab.txt": "one"})
    params = {"files": {"vocab": written.format(folder=tmp_path)}, "rate": 0.5}
    one = capture("m.py:f", tmp_path, params=params)
    write(tmp_path, {"assets/vocab.txt": "two"})
    two = capture("m.py:f", tmp_path, params=params)
    assert one.digest != two.digest
    elsewhere = pickle.loads(pickle.dumps(one))
    assert elsewhere.load()(**elsewhere.located(params)) == "one"
    assert two.function()(**params) == "two"


def test_file_without_extension_in_params_counts(tmp_path: Path) -> None:
    write(
        tmp_path, {"m.py": "def f(size, mode):\n    return int(open(size).read()), mode\n", "hidden": "32", "folder/a.txt": ""}
    )
    params = {"size": "hidden", "mode": "folder"}
    one = capture("m.py:f", tmp_path, params=params)
    assert one.files.keys() == {"m.py", "hidden"} and one.function()(**params) == (32, "folder")
    write(tmp_path, {"hidden": "64"})
    assert capture("m.py:f", tmp_path, params=params).digest != one.digest


def test_file_in_params_of_installed_code_counts(tmp_path: Path) -> None:
    write(tmp_path, {"words.txt": "one"})
    params = {"input": "words.txt", "no": "x" * 5000 + "/."}
    one = capture("json:loads", tmp_path, params=params)
    write(tmp_path, {"words.txt": "two"})
    assert capture("json:loads", tmp_path, params=params).digest != one.digest
    assert one.located(params)["input"] == str(tmp_path / "words.txt")


def test_large_file_in_params_keeps_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.usercode.files._SHIPPED_BYTES", 2)
    write(tmp_path, {"m.py": "def f(vocab): ...\n", "vocab.txt": "one"})
    code = capture("m.py:f", tmp_path, params={"vocab": "vocab.txt", "mode": "train", "other": "no/such.txt"})
    assert code.located({"vocab": "vocab.txt", "mode": "train"}) == {"vocab": str(tmp_path / "vocab.txt"), "mode": "train"}
    assert code.files.keys() == {"m.py"}


@pytest.mark.parametrize("read", ["os.environ['RATE']", "os.getenv('RATE')", "dict(os.environ)"])
def test_environment_variables_are_listed_by_line(tmp_path: Path, read: str) -> None:
    source = f"import os\ndef f(x):\n    return {read}\n"
    assert capture("m.py:f", write(tmp_path, {"m.py": source})).variables == ("m.py:3",)


def test_editable_install_counts_by_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "repo", {"mylib_e/__init__.py": "from .net import W\n", "mylib_e/net.py": "W = 1\n"})
    info = {"METADATA": "Metadata-Version: 2.1\nName: mylib-e\nVersion: 0.1\n", "top_level.txt": "mylib_e\n"}
    write(
        tmp_path / "site" / "mylib_e-0.1.dist-info",
        info | {"direct_url.json": '{"dir_info": {"editable": true}, "url": "file:///r"}'},
    )
    write(tmp_path / "project", {"m.py": "from mylib_e import W\ndef f():\n    return W\n"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "repo"))

    def captured() -> UserCode:
        installed._distributions.cache_clear()
        installed._source_digest.cache_clear()
        return capture("m.py:f", tmp_path / "project")

    try:
        before = captured()
        write(tmp_path / "repo", {"mylib_e/net.py": "W = 2\n"})
        assert before.versions["mylib-e"].startswith("0.1+source.")
        assert captured().digest != before.digest
    finally:
        installed._distributions.cache_clear()
        installed._source_digest.cache_clear()


def test_missing_variable_on_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    write(tmp_path, {"m.py": "import os\n\nTOKEN = os.environ['MY_TOKEN']\n\n\ndef f():\n    return TOKEN\n"})
    with pytest.raises(UserCodeError, match=r"m\.py:3: KeyError: 'MY_TOKEN'") as refused:
        capture("m.py:f", tmp_path).load()
    assert refused.value.next_step.startswith("set the environment variable MY_TOKEN where the code runs")
