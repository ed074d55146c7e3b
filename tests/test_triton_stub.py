"""Files with kernels can be imported where there is no Triton, and compute with PyTorch there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import draftgraph.kernels

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from importlib import import_module
import torch
for name in sys.argv[1:]:
    import_module(f"draftgraph.kernels.{name}")
from draftgraph.kernels.best import best_tokens
from draftgraph.kernels.triton_or_stub import available
assert not available
print(best_tokens(torch.tensor([[0.0, 2.0, 1.0]]), 2)[0].tolist())
"""


def test_every_kernel_file_is_imported_without_triton() -> None:
    names = sorted(file.stem for file in Path(draftgraph.kernels.__path__[0]).glob("*.py") if file.stem != "__init__")
    found = subprocess.run([sys.executable, "-c", WITHOUT_TRITON, *names], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "[[1, 2]]"
