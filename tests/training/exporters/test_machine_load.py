"""Do charts of the machine come from the process that trains, as often as they are due, and end no training?"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.training.events import Event, MachineLoad, Warned
from penstock.training.exporters.machine_load import MachineSampler
from penstock.training.loop.event_sender import EventSender
from tests.training.digits import ListClient, make_job, train_alone


class Nvml:
    """A driver with two GPUs, the second twice as busy."""

    nvmlInit = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index + 1)
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(used=20e9 * handle, total=80e9))
    nvmlDeviceGetPowerUsage = staticmethod(lambda handle: 100_000 * handle)
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda handle: 400_000)
    nvmlDeviceGetUtilizationRates = staticmethod(lambda handle: SimpleNamespace(gpu=30 * handle))


def test_sample_is_taken_when_due_and_failure_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    now = [0.0]
    sampler = MachineSampler(every_s=10, clock=lambda: now[0])
    assert sampler.take() == []
    now[0] = 10
    (load,) = sampler.take()
    assert isinstance(load, MachineLoad) and sampler.take() == []
    assert load.values["system/disk_usage_percentage"] == pytest.approx(psutil.disk_usage("/").percent, abs=2)
    assert 0 < load.values["system/system_memory_usage_percentage"] < 100
    gpu = {name.removeprefix("system/gpu_1_"): value for name, value in load.values.items() if "gpu_1" in name}
    assert gpu == {
        "utilization_percentage": 60,
        "memory_usage_megabytes": 40_000,
        "memory_usage_percentage": 50,
        "power_usage_watts": 200,
        "power_usage_percentage": 50,
    }

    def fails(path: str) -> Any:
        raise OSError("no such disk")

    monkeypatch.setattr(psutil, "disk_usage", fails)
    now[0] = 30
    assert sampler.take() == [Warned(message="no more charts of the machine: OSError: no such disk")]
    now[0] = 1e9
    assert sampler.take() == []


def test_rank_0_samples_its_machine_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.exporters.machine_load.MachineSampler", partial(MachineSampler, every_s=0.0))
    client = ListClient()
    train_alone(make_job(tmp_path, max_steps=2), client)
    assert any(isinstance(event, MachineLoad) for event in client.events)


def test_samples_travel_with_the_events_of_rank_0() -> None:
    delivered: list[Event] = []

    class Client:
        def put(self, events: list[Event]) -> bool:
            delivered.extend(events)
            return bool(events)

    sender = EventSender(Client(), interval_s=0.001, sample=MachineSampler(every_s=0.01).take)
    assert sender.stop_requested.wait(60)
    sender.close()
    assert isinstance(delivered[0], MachineLoad)
