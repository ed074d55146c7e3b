"""Triton's kernels without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def interpreter(**options: Any) -> Iterator[Callable[..., Any]]:
    """Calls functions where Triton interprets its kernels: that is decided when it is imported, so in a process of its
    own, which `options` are for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **options) as process:
            yield lambda *given, **named: process.submit(*given, **named).result()


@contextmanager
def strict_interpreter() -> Iterator[Callable[..., Any]]:
    """The same; memory that is allocated and never written is not a number."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    with interpreter(initializer=torch.use_deterministic_algorithms, initargs=(True,)) as call:
        yield call


@contextmanager
def in_one_order(**names: Any) -> Iterator[Callable[..., Any]]:
    """The same, where every sum of a product is formed in the order of its terms, as hardware does, and does not depend
    on the shape of the tile. `names`: constants of `attention` or `linear` that are others there."""
    with strict_interpreter() as call:
        call(_sum_in_order, names)
        yield call


def _sum_in_order(names: dict[str, int]) -> None:
    import triton.language as tl
    from triton.runtime import interpreter as ours

    from draftgraph.kernels import attention, linear

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        first, second, found = numbers(a), numbers(b), d.data.copy()
        for step in range(first.shape[1]):
            found = found + first[:, step, None] * second[None, step]
        return ours.TensorHandle(found, d.dtype.scalar)

    ours.InterpreterBuilder.create_dot = create_dot
    for name, value in names.items():
        for module in (attention, linear):
            if hasattr(module, name):
                known = getattr(module, name)
                setattr(module, name, value if isinstance(known, int) else tl.constexpr(value))


def ptx_of(kernel: Any, kinds: dict[str, str], fixed: dict[str, Any], options: dict[str, int]) -> str:
    """What a kernel is compiled to for a Hopper chip: pointers and strides are multiples of 16, as they mostly are."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = [name.endswith(("_row", "_stride", "_head", "_node", "_slot", "inputs")) for name in kernel.arg_names]
    places = [place for place, kind in enumerate(signature.values()) if kind.startswith("*") or aligned[place]]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    code: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return code


def ptx_of_attention(queries: int, single: bool, dtype: torch.dtype, size: int, value_size: int, windows: bool) -> str:
    """The same of paged attention; `single`: a program reads all of its text."""
    from draftgraph.kernels.attention import Tiling, _attend

    names = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    kinds = dict.fromkeys(("starts", "lengths", "pages", "scratch_positions", "counters"), "*i32")
    kinds |= dict.fromkeys(("ancestors", "positions"), "*i64") | {"scale": "fp32", "log2e": "fp32"}
    kinds |= dict.fromkeys(("query", "key", "value", "out"), names[dtype])
    kinds |= dict.fromkeys(("partial_best", "partial_total", "partial_acc"), "*fp32")
    columns, value_columns = (1 << (one - 1).bit_length() for one in (size, value_size))
    tiling = Tiling.of(queries, max(columns, value_columns), dtype.itemsize, 227 * 1024)
    fixed = {"heads": 4, "size": size, "columns": columns, "value_size": value_size, "value_columns": value_columns}
    fixed |= {"block_queries": tiling.block_queries, "block_keys": tiling.block_keys}
    fixed |= {"tail_block": tiling.tail_block, "padded_texts": 128, "single": single} | dict.fromkeys(("cap", "sinks"))
    fixed |= {} if windows else {"window": None}
    return ptx_of(_attend, kinds, fixed, {"num_warps": tiling.warps, "num_stages": 2 * tiling.stages - 1})
