"""How busy is the machine that trains? Rank 0's process samples it.

The names are those of MLflow's own system metrics, so that its page shows them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psutil

from penstock.messages import describe_error
from penstock.training.events import Event, MachineLoad, Warned, now_ms

__all__ = ["MachineSampler"]


EVERY_S = 10.0


class MachineSampler:
    """Samples CPU, memory, disk, network and, where nvidia-ml-py is installed, GPUs of this machine.

    Args:
        every_s: seconds between two samples.
        clock: monotonic seconds.
    """

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s, self._clock = every_s, clock
        self._due_s = clock() + every_s
        self._gpus = _gpus()
        psutil.cpu_percent()  # of the time since the last call
        self._network = psutil.net_io_counters()

    def take(self) -> list[Event]:
        """Return a sample if one is due. A failure gives one warning and ends the samples: a chart must not end training."""
        if self._clock() < self._due_s:
            return []
        self._due_s = self._clock() + self._every_s
        try:
            return [MachineLoad(t_ms=now_ms(), values={f"system/{name}": value for name, value in self._sample().items()})]
        except Exception as error:  # drivers and kernels have many
            self._due_s = float("inf")
            return [Warned(message=f"no more charts of the machine: {describe_error(error)}")]

    def _sample(self) -> Mapping[str, float]:
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / 1e6,
            "disk_available_megabytes": disk.free / 1e6,
            "network_receive_megabytes": (network.bytes_recv - self._network.bytes_recv) / 1e6,
            "network_transmit_megabytes": (network.bytes_sent - self._network.bytes_sent) / 1e6,
        }
        for index, gpu in enumerate(self._gpus):
            values |= {f"gpu_{index}_{name}": value for name, value in gpu().items()}
        return values


def _gpus() -> list[Callable[[], Mapping[str, float]]]:
    """Make a sampler for each GPU of the machine; none without nvidia-ml-py, a driver or a GPU."""
    try:
        nvml = importlib.import_module("pynvml")  # the extra `gpu`
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # no package, or any of NVML's errors
        return []
    return [partial(_gpu, nvml, handle) for handle in handles]


def _gpu(nvml: Any, handle: Any) -> Mapping[str, float]:
    memory, watts = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return {
        "utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_usage_megabytes": memory.used / 1e6,
        "memory_usage_percentage": 100 * memory.used / memory.total,
        "power_usage_watts": watts,
        "power_usage_percentage": 100_000 * watts / nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
    }
