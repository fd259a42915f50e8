"""Is what a loop stands with seen, and only that?"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from penstock.training.frameworks.ray_train.restoring import seen_state, witness
from penstock.training.frameworks.ray_train.restoring.live_names import live_names
from penstock.training.frameworks.ray_train.restoring.seen_state import Look, look, user_frames
from penstock.training.ranks import Group
from tests.training.digits import CPU, make_job

OWN = __name__.partition(".")[0]
"""What counts as the package of user code here."""


@pytest.fixture(autouse=True)
def this_module_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Globals of other tests, which are of the same package, come and go."""
    monkeypatch.setattr(seen_state, "sys", SimpleNamespace(modules={__name__: sys.modules[__name__]}))


def seen(**params: Any) -> Look:
    """What is seen from the function that calls this."""
    return look(OWN, user_frames(OWN, sys._getframe(1))[-1:], params, torch.device("cpu"))


def held(there: Look, function: str) -> set[str]:
    return {name.partition(": ")[2] for name in there.state if function in name}


def test_live_are_the_variables_that_may_be_read_and_those_that_count_the_turns_of_loops_around() -> None:
    found = []

    def loop(turns: int, unused: int) -> int:
        overwritten, total, told = 1, 0, 5
        print(unused)
        for _turn in range(turns):
            for _ in range(2):
                found.append(live_names(sys._getframe().f_code, sys._getframe().f_lasti))
                overwritten = turns
                total += overwritten
        try:
            return total
        finally:
            print(told)

    loop(1, 2)
    (live,) = set(found)
    assert live == {"turns", "total", "told", "_turn", "_", "found"}, "a value that is written before it is read counts no more"


class Kept:
    turns = 3

    def __init__(self) -> None:
        self.rate, self.noise, self.rows = 0.5, np.random.default_rng(1), np.zeros(3)


class Averages:
    def __init__(self) -> None:
        self.of, self.asked = 0, 0

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"of": self.of}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.of = state["of"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self._hidden = nn.Linear(2, 1), 0, 1


def states() -> Iterator[tuple[Look, dict[str, Any]]]:
    """What is seen of this function again and again, and what it holds."""
    kept, model, numbers = Kept(), Net(), [1, 2, 3]
    averages = Averages()
    loader = DataLoader(torch.zeros(4), shuffle=True, generator=torch.Generator())
    dice, old, turns = random.Random(3), np.random.RandomState(3), itertools.count()
    began_s, words = time.time(), ["none"]
    draw = functools.partial(noisy, dice)
    while True:
        yield seen(), {"kept": kept, "model": model, "numbers": numbers, "averages": averages, "loader": loader}
        draw()
        print(began_s, words, old.random_sample(), next(turns))


def noisy(dice: random.Random) -> float:
    return dice.random()


def test_what_holds_a_state_is_found_where_the_loop_holds_it_and_each_change_shows() -> None:
    def changed(change: Callable[[], Any] = lambda: None) -> set[str]:
        change()
        there, _ = next(loop)
        names = {name for name in last.keys() | there.state.keys() if last.get(name) != there.state.get(name)}
        last.update(there.state)
        return {name.partition(": ")[2] for name in names}

    loop = states()
    there, holds = next(loop)
    last = dict(there.state)
    always = changed()
    assert always == {"draw.args[0]", "old", "turns"}
    kept, model, noise = holds["kept"], holds["model"], holds["loader"].generator
    assert changed(lambda: model.layer.bias.data.add_(1)) - always == {"model"}
    assert changed(model.eval) - always == {"model"}
    assert changed(lambda: setattr(model, "calls", 1)) - always == {"model.calls"}
    assert changed(lambda: setattr(model, "_hidden", 2)) - always == set()
    assert changed(lambda: holds["averages"].load_state_dict({"of": 7})) - always == {"averages"}
    assert changed(lambda: setattr(kept, "rate", 1)) - always == {"kept.rate"}
    assert changed(kept.noise.random) - always == {"kept.noise"}
    assert changed(lambda: kept.rows.fill(1)) - always == {"kept.rows"}
    assert changed(lambda: setattr(Kept, "turns", 4)) - always == {"Kept.turns"}
    assert changed(lambda: noise.manual_seed(5)) - always == {"loader.generator"}
    assert changed(lambda: holds["numbers"].append(4)) - always == {"numbers[3]"}
    assert changed(lambda: torch.rand(1)) - always == {"random numbers"}
    assert not any("began_s" in name or "words" in name for name in last)


@pytest.mark.parametrize(
    "kept",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.tensor([[0.0, 2.0], [1.0, 0.0]]).to_sparse(),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T,
        torch.tensor(7),
    ],
    ids=["conjugate", "negative", "sparse", "bfloat16", "transposed", "scalar"],
)
def test_tensors_of_any_kind_are_known_by_their_values(kept: torch.Tensor) -> None:
    def looked(kept: Any) -> Any:
        there = seen()
        assert kept is not None
        return next(state for name, state in there.state.items() if name.endswith(": kept"))

    other = torch.zeros(7) if kept.dtype != torch.float32 else torch.ones(7)
    assert looked(kept) == looked(kept.clone()) != looked(other)
    words = [np.array(["".join(letters), None], dtype=object) for letters in ("ab", "ab", "cd")]
    assert looked(words[0]) == looked(words[1]) != looked(words[2])


def test_gradients_that_cannot_be_looked_at_end_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_parameters: Any) -> str:
        raise RuntimeError("no bytes of this kind")

    monkeypatch.setattr(witness, "gradients_digest", fail)
    manifest = SimpleNamespace(writer="a1-r0", step=3)
    looks = witness.Witness(make_job(tmp_path), Group(0, 1, CPU), fail, "a1-r1", manifest)  # type: ignore[arg-type]
    try:
        looks.batch()
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()
        assert looks.reasons() == [
            "what train_func restores of a checkpoint cannot be seen: RuntimeError: no bytes of this kind"
        ]
    finally:
        looks.close()


def test_params_are_no_state_and_a_variable_without_a_value_is_known_as_such() -> None:
    config = {"rate": 0.1, "width": 8}
    there = seen(rate=0.1)
    for late in range(config["width"]):
        assert late >= 0
    assert held(there, "params_are_no_state") == {"config['width']"}
    assert [name.partition(": ")[2] for name in there.unbound] == ["late"] and late


def test_large_data_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.frameworks.ray_train.restoring.seen_state._KEPT_BYTES", 8)
    images, losses, weights = torch.zeros(3), [0.5] * 900, torch.zeros(2)
    assert held(seen(), "large_data") == {"losses", "weights"}
    monkeypatch.setattr("penstock.training.frameworks.ray_train.restoring.seen_state._MOST", 1)
    assert held(seen(), "large_data") == {"losses"}
    assert len(images) > len(weights) < len(losses) and monkeypatch
