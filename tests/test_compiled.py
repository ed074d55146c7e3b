"""Compiled graph work: its table, its heap and its bits, and what happens where nothing can be kept."""

from __future__ import annotations

import heapq
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgraph.graph import WORD, ancestor_bits
from draftgraph.graph.unroll import THING, pop, push
from draftgraph.proposers.copying import CHOICES
from draftgraph.proposers.pooling import BEST, PLACES, REST, SILENCE, UNNAMED, VOICES, WEIGHT, correct, pool
from draftgraph.proposers.table import FREE, empty, get, put, take_over

keys = st.integers(0, 1 << 62)


@given(st.lists(st.tuples(keys | st.integers(0, 20), st.integers(0, 99)), max_size=60))
def test_a_table_is_a_dictionary(entries: list[tuple[int, int]]) -> None:
    table, known, count = empty(60), {}, 0
    for key, value in entries:
        count += put(table, key, value)
        known[key] = value
    assert count == len(known)
    assert all(get(table, key) == value for key, value in known.items())
    assert get(table, 1 << 61) == known.get(1 << 61, FREE)
    larger = empty(200)
    late = {key: value for key, value in known.items() if value >= 50}
    assert take_over(larger, table, 50) == len(late)
    assert all(get(larger, key) == late.get(key, FREE) for key in known)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=60))
def test_a_heap_gives_the_best_first_and_of_equals_the_first(actions: list[float | None]) -> None:
    heap, size, expected = np.empty(61, dtype=THING), 0, []
    for number, score in enumerate(actions):
        if score is not None:
            size = push(heap, size, score, number)
            heapq.heappush(expected, (-score, number))
        elif size:
            size = pop(heap, size)
            assert (-heap["score"][size], heap["number"][size]) == heapq.heappop(expected)
    assert size == len(expected)


@given(st.lists(st.integers(0, 200), max_size=150))
def test_bits_tell_of_all_ancestors(backs: list[int]) -> None:
    parents = [-1, *(max(0, node - back) for node, back in enumerate(backs))]
    words = 1 + len(parents) // WORD
    bits = ancestor_bits(np.array(parents), words)
    for node in range(len(parents)):
        seen, at = set(), node
        while at >= 0:
            seen.add(at)
            at = parents[at]
        found = {word * WORD + bit for word in range(words) for bit in range(WORD) if int(bits[node, word]) >> bit & 1}
        assert found == seen


def weighed(drafted: Any, probs: Any, named: Any, said: Any) -> Any:
    """The formula at once: what a draft proposes, and what memories name, every token once."""
    same = named[:, None] == drafted
    alone = ~same.any(axis=1) & (named != -1)
    support = (np.maximum(said, SILENCE) / SILENCE) ** WEIGHT
    believed = probs * (same * support[:, None]).max(axis=0, initial=1.0)
    unnamed = UNNAMED * support * alone
    total = believed.sum() + unnamed.sum() + max(1.0 - probs.sum(), REST)
    without = said * alone / max((said * alone).sum(), 1.0)
    return np.concatenate([believed / total, unnamed / total if probs.sum() > 0 else without])


@given(st.data())
def test_opinions_are_pooled_by_the_formula(data: Any) -> None:
    k = data.draw(st.integers(1, 5))
    names = data.draw(st.lists(st.integers(0, 9), min_size=k, max_size=k, unique=True))
    said = np.zeros(k + 2 * CHOICES)
    drafted = data.draw(st.booleans())
    said[:k] = np.sort(data.draw(st.lists(st.floats(0.01, 0.9 / k), min_size=k, max_size=k)))[::-1] if drafted else 0.0
    others = data.draw(st.lists(st.integers(0, 12), max_size=2 * CHOICES, unique=True))
    named = np.full(len(said), -1)
    named[:k] = names if drafted else -1
    named[k : k + len(others)] = others
    said[k : k + len(others)] = data.draw(st.lists(st.floats(0.01, 0.9), min_size=len(others), max_size=len(others)))
    estimates, chances = np.empty(len(said)), np.empty(len(said))
    pool(named, said, k, estimates)
    assert estimates.tolist() == pytest.approx(weighed(named[:k], said[:k], named[k:], said[k:]).tolist())
    curves = np.tile(PLACES, (len(VOICES), 1))
    correct(estimates, k, PLACES, curves, chances)
    kept = chances > 0
    assert chances[kept].tolist() == pytest.approx(estimates[kept].tolist())
    best = np.argsort(-estimates, kind="stable")[:k]  # of equals the first
    assert set(np.flatnonzero(kept)) == {column for column in best if estimates[column] > 0}
    curves[:, 1:] *= 0.5
    correct(estimates, k, PLACES, curves, chances)
    expected = np.interp(estimates, PLACES, curves[0])
    assert chances[kept].tolist() == pytest.approx(expected[kept].tolist())
    curves[VOICES.index(BEST)] = 0.99
    correct(estimates, k, PLACES, curves, chances)
    assert np.isclose(chances[:k], 0.99).sum() == int(drafted), "the draft's best child has a curve of its own"


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    script = "from draftgraph.proposers.table import *; t = empty(4); put(t, 7, 8); print(get(t, 7))"
    environment = {"NUMBA_CACHE_DIR": str(blocked / "below"), "PATH": "", "HOME": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "8", found.stderr
