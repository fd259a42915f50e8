"""Which errors of a worker may pass, so that a restart helps, and which would it only meet again? docs/deploy.md lists them."""

from __future__ import annotations

import errno

from penstock.errors import TrainingError

__all__ = ["IN_THE_MODEL", "device_error", "may_pass", "not_a_number"]

IN_THE_MODEL = "where the model or train.params set it, or clip gradients there"
"""The place of the learning rate for frameworks that do not read `train.learning_rate`."""

_MEMORY = (
    *("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    "'out of memory'",  # NCCL: Cuda failure 2 'out of memory'
)

_DEVICE = (
    *("uncorrectable ECC error", "uncorrectable NVLink error", "hardware stack error", "unspecified launch failure"),
    *("launch timed out", "devices are busy or unavailable", "device is unavailable", "no CUDA-capable device is detected"),
    *("system not yet initialized", "CUDA error: unknown error", "CUBLAS_STATUS_EXECUTION_FAILED"),
    *("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_EXECUTION_FAILED", "NCCL error"),
)
"""Words of errors of a GPU that another start, or another GPU, need not meet. Not an illegal access, which is a bug."""

_NOT_DEVICE = ("ncclInvalidUsage", "ncclInvalidArgument")
"""Words of an error of NCCL about how it is called, which is a bug."""

_SYSTEM = (
    *(errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
)

_NETWORK = ("ConnectionError", "ConnectError", "Timeout", "TimeoutError")
"""Ends of the names of errors of requests, urllib3, httpx, aiohttp and botocore."""


def device_error(error: BaseException, where: str) -> TrainingError | None:
    """Describe an error of a GPU that a restart would meet again; None for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if type(error).__name__ == "OutOfMemoryError" or any(each in text for each in _MEMORY):  # torch's
        return TrainingError(
            f"the GPU has too little memory for a step: {'. '.join(' '.join(text.split()).split('. ')[:2])}{where}",
            next_step="lower train.batch_rows (of a function: the batch size in train.params), or raise train.accumulate, or "
            "set train.precision: bf16",
        )
    if "device-side assert" in text:
        return TrainingError(
            "a check on the GPU failed (device-side assert): mostly an index out of range, such as a label that is not below "
            f"the number of classes{where}",
            next_step="run again with train.gpus: 0, which names the line and the value",
        )
    if "ncclInvalidUsage" in text:
        return TrainingError(
            f"NCCL is used in a wrong way: {' '.join(text.split())}{where}",
            next_step="give each worker a GPU of its own (train.gpus), and let all ranks call the same collectives; then run "
            "the same command again",
        )
    return None


def may_pass(error: BaseException) -> bool:
    """Whether the fault may be gone at another try: of a network, of a store, or of a device."""
    if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _SYSTEM:
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and any(each in text for each in _DEVICE):
        return not any(each in text for each in _NOT_DEVICE)
    return any(kind.__name__.endswith(_NETWORK) for kind in type(error).__mro__)


def not_a_number(
    what: str, rate: str = "(train.learning_rate, or where the recipe's own optimizer() sets it) or set train.clip_norm"
) -> TrainingError:
    """Make the error that ends training; `what` is not finite. `rate` is the place of the learning rate."""
    return TrainingError(
        f"{what}; nothing was saved after it",
        next_step=f"lower the learning rate {rate}, check the values of the features, and run again: "
        "it continues from the checkpoint before, with the new rate",
    )
