"""Is a packed tree a copy that comes back as it was, through a file that is read without unpickling code?"""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.storage import Storage
from penstock.training.checkpoint import packed
from penstock.training.checkpoint.packed import copied, pack, unpack
from penstock.training.checkpoint.state_files import TRAINING, training_file, training_of


def reread(packed: dict[str, Any]) -> Any:
    """Write and read the file of a checkpoint; without the ranks' generators."""
    with tempfile.TemporaryDirectory() as folder:
        training_file(packed, torch.zeros(1, 1, dtype=torch.uint8)).save(Path(folder, TRAINING))
        found = training_of(Storage(folder))
    del found["ranks"]
    return found


TENSORS = {
    "float32": torch.tensor([1.5, float("nan"), -0.0]),
    "one number": torch.tensor(3, dtype=torch.int64),
    "bfloat16": torch.full((3, 5), 0.1, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "no rows": torch.empty(0, 7),
    "columns first": torch.arange(12.0).reshape(3, 4).T,
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a parameter": torch.nn.Parameter(torch.rand(3)),
    "seen through": torch.rand(3).expand(4, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(name: str) -> None:
    tensor = TENSORS[name]
    back = reread(pack({"before": torch.ones(1, dtype=torch.uint8), "it": tensor}))["it"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.is_contiguous() and not back.requires_grad
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(back.reshape(-1).view(torch.uint8), flat)
    assert back.untyped_storage().nbytes() == back.nbytes, "one small number must not keep the block alive"


def test_other_values_keep_their_type() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(1.0)}, 1: {}},
        "groups": [{"lr": 0.1, "betas": (0.9, torch.tensor(0.5)), "foreach": None, "params": [0, 1]}],
        "milestones": Counter({np.int64(5): 1}),
        "better": {np.int64(2): np.bool_(True)},
        "ordered": OrderedDict(b=1, a=torch.tensor([2])),
    }
    back = reread(pack(tree))
    assert back["state"] == {0: {"step": torch.tensor(1.0)}, 1: {}}
    assert back["groups"] == tree["groups"] and type(back["groups"][0]["betas"]) is tuple
    assert back["milestones"] == tree["milestones"] and type(back["milestones"]) is Counter
    assert type(next(iter(back["milestones"]))) is int and back["better"] == {2: True} and type(back["better"][2]) is bool
    assert list(back["ordered"]) == ["b", "a"] and type(back["ordered"]) is OrderedDict


def test_a_tree_without_tensors_is_packed() -> None:
    assert reread(pack({"scaler": {}, "rate": 0.5})) == {"scaler": {}, "rate": 0.5}


def test_a_generator_continues_from_an_unpacked_state() -> None:
    generator = torch.Generator().manual_seed(3)
    back = reread(pack({"before": torch.ones(3), "extra": {"rng": generator.get_state()}}))
    drawn = torch.rand(4, generator=generator)
    generator.set_state(back["extra"]["rng"])  # of a tensor amid a storage it would read what lies before it
    assert torch.equal(torch.rand(4, generator=generator), drawn)


class Marked(Tensor):
    """A user's kind of tensor."""


def test_tensors_of_other_kinds_are_kept_as_they_are() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    back = unpack(**pack([torch.ones(2), torch.ones(2).as_subclass(Marked), nested]))
    assert [type(tensor) for tensor in back] == [Tensor, Marked, Tensor]
    assert back[2].is_nested and torch.equal(back[0], torch.ones(2))


def test_a_sparse_tensor_stays_one() -> None:
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    back = reread(pack({"it": sparse}))["it"]
    assert back.is_sparse and torch.equal(back.to_dense(), sparse.to_dense())


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(2, 2).to_sparse(), [1], Counter(a=1)])
def test_later_changes_do_not_reach_the_copy(value: Any) -> None:
    packed = pack({"it": value})
    if isinstance(value, Tensor):
        value.add_(torch.ones(2, 2).to_sparse() if value.is_sparse else 1)
        assert not unpack(**packed)["it"].to_dense().any()
    else:
        value.clear()
        assert unpack(**packed)["it"]


def test_copy_is_made_without_pinned_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    empty = torch.empty

    def refusing(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    monkeypatch.setattr(packed.torch, "empty", refusing)
    assert packed._host_memory([2, 3], torch.float32, pinned=True).shape == (2, 3)
    assert "no memory can be pinned" in caplog.text


def test_memory_for_a_copy_is_not_filled_first() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            copied(torch.ones(8))
            assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            assert torch.empty(8).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
