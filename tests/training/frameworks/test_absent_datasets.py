"""Is a training function refused only where it asks for an absent dataset on every way?"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.training.frameworks.ray_train.old_names import refuse_absent_datasets
from penstock.usercode.capture import capture

ASK = 'train.get_dataset_shard("extra")'
BODIES = {
    "early return": f"if not config:\n        return\n    {ASK}",
    "early raise": f"for each in config:\n        raise ValueError(each)\n    {ASK}",
    "return in a block": f"with contextlib.suppress(KeyError):\n        return config[1]\n    {ASK}",
    "after a return": f"return 1\n    {ASK}",
    "and": f'found = config.get("v") and {ASK}',
    "loop": f"for _ in config:\n        {ASK}",
    "while": f"while config.pop():\n        {ASK}",
    "comprehension": f"[{ASK} for _ in config]",
    "suppressed": f"with contextlib.suppress(Exception):\n        {ASK}",
    "match": f"match config:\n        case {{'v': 1}}: {ASK}",
    "inner function": f"async def inner():\n        {ASK}",
}


def refuse(folder: Path, body: str) -> None:
    (folder / "loop.py").write_text(f"import contextlib\nfrom ray import train\n\n\ndef loop(config):\n    {body}\n")
    refuse_absent_datasets(capture("loop.py:loop", folder, {}), ["train"])


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_dataset_not_always_asked_for_is_no_error(tmp_path: Path, body: str) -> None:
    refuse(tmp_path, body)


@pytest.mark.parametrize(
    "body", [ASK, f"return {ASK}", f"def inner():\n        return 1\n    rows = {ASK}.iter_batches()", f"print(next({ASK}))"]
)
def test_dataset_always_asked_for_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(SpecError, match="asks for a dataset that does not exist") as caught:
        refuse(tmp_path, body)
    assert "get_dataset_shard('extra')" in caught.value.problems[0]
