"""Does a file that the code only writes not count as code? Else a recipe that keeps a log would change with each run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.usercode.capture import UserCode, capture
from penstock.usercode.needed_files import without_files_of

CODE = """
import json, logging, os, gzip
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE / "out.txt"

class Net:
    log: str = "out.txt"

    def __init__(self):
        self.path = Path("out.txt")

    def loss(self, plt, frame, torch, name):
        BODY
"""


def captured(root: Path, body: str) -> UserCode:
    (root / "model.py").write_text(CODE.replace("BODY", body))
    return capture("model.py:Net", root)


def both(root: Path, body: str) -> tuple[UserCode, UserCode]:
    """The code before and after it has written its file."""
    before = captured(root, body)
    (root / "out.txt").write_text("what it wrote")
    return before, captured(root, body)


WRITES = [
    "open('out.txt', 'a').write('x')",
    "open(file='out.txt', mode='wb')",
    "open(OUT, mode='xt')",
    "gzip.open('out.txt', 'wt')",
    "open('out.txt', 'w' if name else 'a')",
    "OUT.open('w').write('x')",
    "self.path.open(mode='a')",
    "(HERE / 'out.txt').write_text('x')",
    "os.path.exists('out.txt') or open('out.txt', 'w').close()",
    "local = OUT.resolve(); local.exists() or local.touch()",
    "torch.save({}, self.path)",
    "torch.save({}, f=OUT)",
    "frame.to_csv(os.path.join('.', self.log))",
    "plt.savefig(str(OUT), format='png')",
    "logging.basicConfig(filename='out.txt')",
    "json.dump({}, open(OUT, 'w'))",
]
READS = [
    "open('out.txt')",
    "open('out.txt', 'r+').write('x')",
    "open('out.txt', 'a+').read()",
    "open('out.txt', name)",
    "open('out.txt', 'w' if name else 'r')",
    "OUT.open()",
    "OUT.write_text(OUT.read_text() + 'x')",
    "OUT.exists() or torch.save({}, OUT); return torch.load(OUT)",
    "torch.save(torch.load('out.txt'), 'other.txt')",
    "os.path.exists('out.txt')",
    "frame.read(self.log)",
    "plt.savefig(OUT); helper(self.path)",
]


@pytest.mark.parametrize(("body", "counts"), [*((body, False) for body in WRITES), *((body, True) for body in READS)])
def test_a_file_counts_and_travels_unless_the_code_only_writes_it(tmp_path: Path, body: str, counts: bool) -> None:
    before, after = both(tmp_path, body)
    assert after.digest != before.digest if counts else after.digest == before.digest
    assert ("out.txt" in after.files) is counts


def test_what_one_function_reads_counts_though_another_writes_it(tmp_path: Path) -> None:
    before, after = both(tmp_path, "open(OUT, 'w')\n\n    def predict(self):\n        return open(OUT).read()")
    assert after.digest != before.digest
    assert "out.txt" in without_files_of(after, ("loss",)).files
