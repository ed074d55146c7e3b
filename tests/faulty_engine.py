"""The real engine process, which breaks when a file says how: for tests of what the server makes of it."""

import os
import time
from pathlib import Path

import torch

from draftgraph import step
from draftgraph.serve import engine_process

ERRORS = {
    "cuda": lambda: torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
}
ORDERS = Path(os.environ["FAULTY_ENGINE"])
sound = step.verify  # the pass of the target


def breaking(*given):
    kind = ORDERS.read_text() if ORDERS.exists() else ""
    if kind == "slow":  # until another order comes
        time.sleep(0.1)
    elif kind:
        ORDERS.unlink()
        raise ERRORS[kind]()
    return sound(*given)


step.verify = breaking
engine_process.main()
