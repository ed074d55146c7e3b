"""What an answer takes beside time."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from draftgraph.bench.stopwatch import Meters, energy_counter


def test_a_cpu_tells_the_size_of_the_process_and_no_energy() -> None:
    meters = Meters(torch.device("cpu"))
    meters.begin()
    assert meters.read().keys() == {"resident_bytes"} and meters.read()["resident_bytes"] > 10_000_000


def test_energy_is_that_of_the_gpu_with_the_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter((1000, 1000, 3500))
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(counted) if handle == "GPU-12" else None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12"))
    monkeypatch.setattr("draftgraph.bench.stopwatch.energy_counter", lambda _: energy_counter(torch.device("cuda")))
    meters = Meters(torch.device("cpu"))
    meters.begin()
    assert meters.read()["joules"] == 2.5


def test_a_gpu_that_does_not_count_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_counter(torch.device("cuda")) is None
