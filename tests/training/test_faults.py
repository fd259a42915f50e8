"""Which words of an error are of a device that may recover, of memory, or of a bug?"""

from __future__ import annotations

import pytest

from penstock.training.faults import device_error, may_pass

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, {} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n{}"


@pytest.mark.parametrize("cause", ["Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'"])
def test_memory_error_of_nccl_is_final_with_advice(cause: str) -> None:
    text = NCCL.format("unhandled cuda error", f"ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{cause}")
    found = device_error(RuntimeError(text), "")
    assert found is not None and "train.batch_rows" in found.next_step and found.message.endswith(cause)


def test_wrong_use_of_nccl_is_final() -> None:
    found = device_error(RuntimeError(NCCL.format("invalid usage", "ncclInvalidUsage: Duplicate GPU detected")), "")
    assert found is not None and found.message.endswith("Duplicate GPU detected") and not found.transient


def test_fault_of_a_device_may_pass_and_bug_may_not() -> None:
    system = NCCL.format("unhandled system error", "ncclSystemError: System call failed")
    assert may_pass(RuntimeError(system)) and device_error(RuntimeError(system), "") is None
    for name in ("ncclInvalidUsage", "ncclInvalidArgument"):
        assert not may_pass(RuntimeError(NCCL.format("invalid", f"{name}: Invalid value")))
