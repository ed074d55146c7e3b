"""What an answer takes beside time: memory at its peak, and energy where the device counts it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from draftgraph.bench.runs import Record


class Meters:
    """Of the device that a target stands on; made before its engines, so that weights are told from the rest."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        self._energy = energy_counter(device)
        self._millijoules = 0

    def begin(self) -> None:
        if self._weights is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.wait()
        if self._energy is not None:
            self._millijoules = self._energy()

    def wait(self) -> None:
        """Until the device has done all that it was told."""
        if self._weights is not None:
            torch.cuda.synchronize(self.device)

    def read(self) -> Record:
        """Since `begin`: what is held beside the weights at most, and joules of the whole device. On a CPU there is
        only the largest size that this process ever had."""
        found: Record = {}
        if self._weights is not None:
            found["extra_bytes"] = torch.cuda.max_memory_allocated(self.device) - self._weights
        elif (resident := peak_resident_bytes()) is not None:
            found["resident_bytes"] = resident
        if self._energy is not None:
            found["joules"] = (self._energy() - self._millijoules) / 1000
        return found


def peak_resident_bytes() -> int | None:
    """Of this process; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def energy_counter(device: torch.device) -> Any:
    """A function that gives millijoules since the driver was loaded; None: no NVML, or a GPU that does not count."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # NVML has an error class for each of its reasons
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
