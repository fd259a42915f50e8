"""Is a resume called bit-exact only where the hardware of every rank is what it was?"""

from __future__ import annotations

import pytest
import torch

from penstock.training.checkpoint import exactness
from penstock.training.checkpoint.exactness import environment_of, environment_of_all, judge, with_reason
from penstock.training.checkpoint.manifest import CheckpointFacts

OWN = environment_of(torch.device("cpu"))
GPU = {**OWN, "device": "H100", "cuda": "13.0"}


def judged(then: list[dict[str, str]], now: list[dict[str, str]]) -> str:
    facts = CheckpointFacts(step=1, epoch=0, position=0, world_size=len(then), environment=environment_of_all(then))
    return judge(facts, len(now), {}, environment_of_all(now))


def on(host: str, *ranks: dict[str, str]) -> list[dict[str, str]]:
    return [{**rank, "host": host} for rank in ranks]


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ([OWN, OWN], [OWN, OWN], "bit-exact"),
        ([OWN, OWN], [OWN, {**OWN, "cpu": "arm64"}], f"same-order: CPU {OWN['cpu']} -> rank 0: {OWN['cpu']}, rank 1: arm64"),
        (on("a", GPU, GPU), on("b", GPU, GPU), "bit-exact"),
        (on("a", GPU, GPU), [*on("a", GPU), *on("b", GPU)], "same-order: GPUs on each node 2 -> 1+1"),
        (on("a", OWN, OWN), [*on("a", OWN), *on("b", OWN)], "bit-exact"),
    ],
)
def test_other_hardware_of_any_rank_is_reported(then: list[dict[str, str]], now: list[dict[str, str]], said: str) -> None:
    assert judged(then, now) == said


def test_reason_with_a_comma_is_added_once() -> None:
    said = with_reason(with_reason("bit-exact", "train.params (lr, momentum)"), "workers 1 -> 2")
    assert with_reason(said, "train.params (lr, momentum)") == with_reason(said, "workers 1 -> 2") == said
    assert said == "same-order: train.params (lr, momentum), workers 1 -> 2"


def test_cpu_model_counts_and_machine_name_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(model: str) -> dict[str, str]:
        text = f"processor : 0\nvendor_id : GenuineIntel\nmodel name : {model}\n"
        monkeypatch.setattr(exactness, "_text_of", lambda path: text if path == "/proc/cpuinfo" else "")
        return environment_of(torch.device("cpu"))

    one, two = environment("Xeon 8481C"), environment("Xeon 8370C")
    assert judged([one], [two]) == f"same-order: CPU {one['cpu']} -> {two['cpu']}" and one["cpu"].endswith("Xeon 8481C")
    assert "host" not in environment_of_all([OWN]) and "boot" not in environment_of_all([OWN])
