"""On which device and in which number format a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftgraph.errors import UsageError

if TYPE_CHECKING:
    import torch

SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
POSSIBLE = "float32, bfloat16, float16, float64 or auto"


def choose_device(device: str | int | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"there is no device {device!r}: use cpu, cuda or cuda:0") from error
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UsageError(
                f"device {str(device)!r} was asked for but this PyTorch finds no CUDA device: "
                "use device='cpu', or install a driver and a CUDA build of PyTorch"
            )
        if chosen.index is not None and chosen.index >= count:
            raise UsageError(f"there is no device {str(device)!r}: the last CUDA device here is cuda:{count - 1}")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' was asked for but this PyTorch finds none: use device='cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """float32, or bfloat16 on CUDA, unless another is asked for; "auto" is the checkpoint's own."""
    import torch

    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "auto":
        return "auto"
    found: Any = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        found = getattr(torch, SHORT_NAMES.get(name, name), None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise UsageError(f"dtype {str(dtype)!r} is not one to compute in: use {POSSIBLE}")
