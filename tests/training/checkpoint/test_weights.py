"""Does the digest of weights see every bit, and nothing but the weights?"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from penstock.training.checkpoint.state_files import weights_digest


def some_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "b.weight": torch.randn(5, 7, generator=generator),
        "a.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(12),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3),
    }


def test_order_and_layout_do_not_change_the_digest() -> None:
    weights = some_weights()
    transposed = {**weights, "b.weight": weights["b.weight"].t().contiguous().t()}
    assert not transposed["b.weight"].is_contiguous()
    assert weights_digest(transposed) == weights_digest(weights)
    assert weights_digest(dict(reversed(weights.items()))) == weights_digest(weights)
    assert weights_digest({**weights, "extra_state": {"not": "a tensor"}}) == weights_digest(weights)


@pytest.mark.parametrize(
    "name, value",
    [
        ("a.bias", torch.zeros(7, dtype=torch.float16)),
        ("b.weight", torch.zeros(7, 5)),
        ("steps", torch.tensor(13)),
        ("mask", torch.tensor([True, True])),
        ("nothing", torch.empty(3, 0)),
    ],
)
def test_dtype_shape_and_value_count(name: str, value: Tensor) -> None:
    assert weights_digest({**some_weights(), name: value}) != weights_digest(some_weights())


def test_the_sign_of_zero_and_the_last_bit_count() -> None:
    assert weights_digest({"w": torch.tensor([0.0])}) != weights_digest({"w": torch.tensor([-0.0])})
    one = torch.tensor([1.0])
    assert weights_digest({"w": one}) != weights_digest({"w": torch.nextafter(one, torch.tensor([2.0]))})


def test_names_count() -> None:
    assert weights_digest({"a": torch.zeros(2)}) != weights_digest({"b": torch.zeros(2)})


def test_safetensors_file_has_the_digest_of_its_weights(tmp_path: Path) -> None:
    weights = some_weights()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    assert weights_digest(safetensors.torch.load_file(tmp_path / "model.safetensors")) == weights_digest(weights)
