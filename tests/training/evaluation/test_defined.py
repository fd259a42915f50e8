"""Does a process that measures load what measuring needs, and no more?"""

from __future__ import annotations

import subprocess
import sys

import pytest

_MEASURE = """
import sys
from penstock.training.evaluation.defined import metric_library
{before}
accuracy = metric_library().classification.BinaryAccuracy()
print("scipy.signal" in sys.modules)
{after}
"""

_WINDOWS = "import scipy.signal.windows; print(len(scipy.signal.windows.hamming(3)), scipy.signal.butter.__name__)"

_MEANWHILE = """
import builtins
real = builtins.__import__
def other(name, *rest):  # as another thread would, while torchmetrics loads
    if name == "torchmetrics.aggregation":
        builtins.__import__ = real
        from scipy.signal import butter
        print(butter.__name__)
    return real(name, *rest)
builtins.__import__ = other
"""


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ("", _WINDOWS, ["False", "3 butter"]),
        (_MEANWHILE, "", ["butter", "True"]),
    ],
    ids=["used later", "used meanwhile"],
)
def test_metrics_do_not_load_scipy_signal(before: str, after: str, printed: list[str]) -> None:
    program = _MEASURE.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == printed, done.stderr
