"""`triton` and `tl` (its language), or stubs without Triton, so that files with kernels can be imported anywhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

__all__ = ["ROUNDING", "available", "compiles_for", "tl", "triton"]


class Stub:
    """Any attribute of it is itself; as a decorator it returns the function."""

    def __getattr__(self, name: str) -> Stub:
        return self

    def __call__(self, *given: Any, **options: Any) -> Any:
        return given[0] if given and callable(given[0]) else self


try:
    import triton
    import triton.language as tl

    available = True
except ImportError:
    triton = tl = Stub()
    available = False


@cache
def compiles_for(device: torch.device) -> bool:
    """Whether Triton is there and compiles for this device: Ampere is the oldest GPU that our kernels are made for."""
    return available and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


ROUNDING: dict[str, Any] = {"enable_fp_fusion": False}  # options of a kernel that rounds every product, as PyTorch does
