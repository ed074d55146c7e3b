"""Attention whose bits depend on a node's own path alone: in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_tools import in_one_order, ptx_of_attention
from test_attention_kernel import OPTIONS, Scene, scene
from torch import Tensor

from draftgraph.engine.pages import PAGE
from draftgraph.kernels.attention import DEEPEST, PagedPass, attend_triton, chunks_of

SCALE = 0.2


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Tensor]]:
    with in_one_order() as call:
        yield lambda *arguments, splits=2, **options: call(attend_triton, *arguments, splits=splits, **options)


def plain(given: Scene, text: int, node: int, more_pages: int = 0) -> tuple[Tensor, Tensor, Tensor, PagedPass]:
    """One node of a tree as plain decoding meets it: alone, its path a text that lies in pages of its own."""
    length, path, pages = int(given.data.lengths[text]), given.paths[text][node], given.data.pages[text].long()
    places = torch.tensor([*range(length), *(length + slot for slot in path)])
    slots = pages[places // PAGE] * PAGE + places % PAGE
    held = -(-len(places) // PAGE)
    states = []
    for pool in (given.key, given.value):
        own = torch.full((1, pool.shape[1], (held + 1) * PAGE, pool.shape[-1]), torch.nan, dtype=pool.dtype)
        own[:, :, PAGE : PAGE + len(places)] = pool[:, :, slots]
        states.append(own)
    query = given.query[:, :, int(given.data.starts[text]) + node][:, :, None]
    table = torch.zeros(1, held + more_pages, dtype=torch.int32)
    table[0, :held] = torch.arange(1, held + 1)
    last = len(places) - 1
    data = PagedPass(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([last], dtype=torch.int32),
        table,
        torch.ones(1, 1, dtype=torch.int64),
        torch.full((1, 1), last),
        torch.full((1, 64), last, dtype=torch.int32),
        1,
    )
    return query, *states, data


CROWDS: dict[str, dict[str, Any]] = {
    "trees behind texts of all lengths": {"lengths": (0, 63, 64, 250), "counts": (7, 9, 6, 20), "groups": 1},
    "behind earlier levels": {"lengths": (60, 255), "counts": (9, 9), "drafted": 9},
    "grouped heads": {"lengths": (40, 130), "counts": (12, 30), "heads": 3, "groups": 1},
    "two words of nodes": {"lengths": (30,), "counts": (70,), "groups": 1},
    "a chunk that is longer": {"lengths": (2100,), "counts": (5,), "groups": 1},
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_node_has_the_bits_of_plain_decoding(interpreted: Callable[..., Tensor], crowd: str) -> None:
    given = scene(3, size=16, **CROWDS[crowd])  # float32 hides no bit
    options = given.options(**OPTIONS["all"] if crowd == "grouped heads" else {})
    found = interpreted(*given.states, given.data, SCALE, **options)
    rng = np.random.default_rng(0)
    for text, paths in enumerate(given.paths):
        for node in rng.choice(len(paths), min(len(paths), 3), replace=False).tolist():
            alone = interpreted(*plain(given, text, node, more_pages=130 * int(rng.integers(2))), SCALE, **options)
            here = found[0, int(given.data.starts[text]) + node]
            assert torch.equal(alone[0, 0], here), (text, node)


def chain(given: Scene, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, PagedPass]:
    """Some tokens of a text, read in one pass behind those before them."""
    visible = torch.ones(count, count).tril().bool()
    words = -(-count // 64)
    bits = torch.nn.functional.pad(visible, (0, words * 64 - count)).unflatten(-1, (words, 64)).long()
    positions = torch.arange(first, first + count)
    data = PagedPass(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([first], dtype=torch.int32),
        given.data.pages,
        (bits << torch.arange(64)).sum(-1),
        positions[None],
        torch.nn.functional.pad(positions, (0, words * 64 - count))[None].int(),
        count,
    )
    return given.query[:, :, first : first + count], given.key, given.value, data


@pytest.mark.parametrize("heads", [1, 4])
def test_a_text_has_the_same_bits_in_any_pieces(interpreted: Callable[..., Tensor], heads: int) -> None:
    """The queries of a whole text, as nodes of one pass behind nothing; then in pieces."""
    length = 150
    given = scene(4, lengths=(0,), counts=(length,), heads=heads, groups=1, size=16, padding=0)
    whole = interpreted(*chain(given, 0, length), SCALE)
    for pieces in ((64, 64, 22), (1, 100, 49)):
        first, found = 0, []
        for count in pieces:
            found.append(interpreted(*chain(given, first, count), SCALE))
            first += count
        assert torch.equal(torch.cat(found, dim=1), whole)


def test_chunks_that_depend_on_the_pass_are_found(interpreted: Callable[..., Tensor]) -> None:
    """A planted fault: a pass over one node has shorter chunks, as if more programs shared its text."""
    given = scene(3, lengths=(230,), counts=(12,), groups=1, size=16)
    found, (alone, data) = (
        interpreted(*given.states, given.data, SCALE)[0, 7],
        (plain(given, 0, 7)[:3], plain(given, 0, 7)[3]),
    )
    assert torch.equal(interpreted(*alone, data, SCALE)[0, 0], found)
    with in_one_order(CHUNK=128, SHORT=128) as call:
        assert not torch.equal(call(attend_triton, *alone, data, SCALE)[0, 0], found)


def test_chunks_cover_every_place_once() -> None:
    starts = [chunk * 256 if chunk <= 8 else 2048 + (chunk - 8) * 1024 for chunk in range(40)]
    for places in (1, 255, 256, 257, 2047, 2048, 2049, 3072, 3073, 32768):
        assert starts[chunks_of(places) - 1] < places <= starts[chunks_of(places)]


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_the_number_of_splits_never_changes_bits(interpreted: Callable[..., Tensor], splits: int) -> None:
    given = scene(6, lengths=(700, 20, 300), counts=(12, 5, 1), groups=1, heads=2, size=16)
    found, expected = (interpreted(*given.states, given.data, SCALE, splits=one) for one in (splits, 2))
    assert torch.equal(found, expected)


def test_paths_as_deep_as_is_allowed_have_the_bits_of_plain_decoding(interpreted: Callable[..., Tensor]) -> None:
    """Two paths of DEEPEST nodes behind the root, taking turns in their slots."""
    given = scene(7, lengths=(94,), counts=(2 * DEEPEST - 1,), groups=1, size=16, padding=0)
    for node, path in enumerate(paths := [[0], *([0, *range(2 - node % 2, node + 1, 2)] for node in range(1, 63))]):
        given.data.ancestors[node] = sum(1 << slot for slot in path) if 63 not in path else 0
        given.data.positions[0, node] = 94 + len(path) - 1
        given.data.scratch_positions[0, node] = 94 + len(path) - 1
    given.paths[0][:] = paths
    found = interpreted(*given.states, given.data, SCALE)
    for node in (0, 1, 30, 61, 62):
        assert torch.equal(interpreted(*plain(given, 0, node), SCALE)[0, 0], found[0, node]), node


@pytest.mark.parametrize("size", [64, 128])
def test_the_kernel_compiles_for_a_gpu_with_one_kind_of_product(size: int) -> None:
    """For any number of queries the same products, but for how many columns they have."""
    found = []
    for queries in (16, 32, 64):
        code = ptx_of_attention(queries, queries > 16, torch.bfloat16, size, size, False)
        wide = set(re.findall(r"wgmma\.mma_async\.\S+?\.(m64)n\d+(k16\.\S+)", code))
        found.append((wide, set(re.findall(r"mma\.sync\S+", code))))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == {("m64", "k16.f32.bf16.bf16")} and len(found[0][1]) == 1  # that of the tail's weights
