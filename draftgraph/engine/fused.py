"""Small steps of a pass, in one kernel each where there is one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from draftgraph.engine import fused_reference


def operations(device: torch.device) -> Any:
    """The module that makes these steps on a device; both have the same functions."""
    return fused_kernel(device) or fused_reference


@cache
def fused_kernel(device: torch.device) -> Any:
    """The kernels' module; None where there is no Triton, or no GPU that it compiles for."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from draftgraph.engine import fused_kernel as kernel
    except ImportError:
        return None
    return kernel
