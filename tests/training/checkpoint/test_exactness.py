"""Is a resume called bit-exact only where the hardware of every rank is what it was?"""

from __future__ import annotations

import pytest
import torch

from penstock.training.checkpoint import exactness
from penstock.training.checkpoint.exactness import environment_of, environment_of_all, judge
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
def test_other_hardware_of_any_rank_is_told(then: list[dict[str, str]], now: list[dict[str, str]], said: str) -> None:
    assert judged(then, now) == said


@pytest.mark.parametrize("flag", ["avx512_vnni", "avx512_bf16", "amx_tile"])
def test_instructions_that_matrix_products_are_computed_with_count(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(flags: str) -> dict[str, str]:
        exactness._cpu_kind.cache_clear()
        text = f"processor : 0\nvendor_id : GenuineIntel\nflags : fpu avx2 {flags}\n\nprocessor : 1\nvendor_id : GenuineIntel\n"
        monkeypatch.setattr(exactness, "_text_of", lambda path: text if path == "/proc/cpuinfo" else "")
        return environment_of(torch.device("cpu"))

    try:
        plain, with_flag = environment("sse2"), environment(f"{flag} sse2")
    finally:
        exactness._cpu_kind.cache_clear()
    assert plain["cpu"].endswith(" GenuineIntel") and with_flag["cpu"] == f"{plain['cpu']} {flag}"
    assert judged([plain], [with_flag]) == f"same-order: CPU {plain['cpu']} -> {with_flag['cpu']}"
    assert judged([with_flag], [plain]).startswith("same-order: CPU ")


def test_the_maker_of_the_cpu_counts_and_the_machines_name_does_not() -> None:
    assert "host" not in environment_of_all([OWN]) and "boot" not in environment_of_all([OWN])
    with open("/proc/cpuinfo") as lines:
        vendor = next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    assert vendor in OWN["cpu"]
