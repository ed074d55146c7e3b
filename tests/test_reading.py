"""Prompts that are read beside the answers of others: how much of them in a step, and of which."""

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from hypothesis import given
from hypothesis import strategies as st
from test_batch import alone, run, sequence_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.cost.budget import FlatCost
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.cost.reading import ALONE, LEAST, SECONDS, SLOWER, Pace, price_of_reading, share

PRICES = FlatCost(node=0.1)


@given(st.lists(st.integers(1, 2000), max_size=20), st.integers(0, 1024))
def test_all_of_the_room_is_shared_and_the_first_has_half(unread, room):
    found = share(unread, room)
    assert sum(found) == min(sum(unread), room)
    assert all(0 <= count <= most for count, most in zip(found, unread, strict=True))
    if unread:
        assert found[0] >= min(unread[0], room // 2)


def test_a_short_prompt_is_read_at_once_beside_a_long_one():
    assert share([8000, 20, 3000], 256) == [128, 20, 108]
    assert share([8000], 256) == [256]


def step_seconds(others: float, read: float) -> float:
    """A machine on which a step takes a hundredth of its price, and reading half as much again."""
    return 0.01 * others + 0.015 * read


def paced(pace: Pace, others: float, steps: int = 40, drafting: float = 0.0) -> int:
    """What is read in the end. Half of a step is spent beside its pass, and `drafting` more in those that read."""
    room = 0
    for _ in range(steps if others else 0):
        pace.learn(2 * step_seconds(others, 0.0), step_seconds(others, 0.0), others, 0.0)
    for _ in range(steps):
        room = pace.room(others, PRICES)
        read = float(price_of_reading(PRICES, np.array([room]))[0])
        seconds = step_seconds(others, read)
        pace.learn(seconds + drafting + step_seconds(others, 0.0), seconds, others, read)
    return room


@pytest.mark.parametrize("others", [1.0, 8.0, 20.0])
def test_a_step_with_a_prompt_takes_a_few_times_as_long_as_one_without(others):
    room = paced(Pace(most=4096), others)
    read, more = (float(price_of_reading(PRICES, np.array([tokens]))[0]) for tokens in (room, room + LEAST))
    usual = step_seconds(others, 0.0)
    assert room == LEAST or usual + step_seconds(others, read) <= SLOWER * 2 * usual
    assert usual + step_seconds(others, more) > SLOWER * 2 * usual


def test_what_drafts_take_is_not_taken_for_reading():
    assert paced(Pace(most=4096), 8.0, drafting=1.0) == paced(Pace(most=4096), 8.0)


def test_the_bound_holds_and_some_is_always_read():
    assert paced(Pace(most=48), 100.0) == 48
    assert paced(Pace(most=5), 100.0) == 5
    assert paced(Pace(most=256), 0.01) == LEAST
    free = FlatCost()
    assert Pace(most=256).room(1.0, free) == 256


def test_where_nobody_waits_more_is_read_but_not_for_long():
    room = paced(Pace(most=48), others=0.0)
    assert 48 < room <= ALONE
    assert step_seconds(0.0, float(price_of_reading(PRICES, np.array([room]))[0])) <= SECONDS


def test_a_step_that_was_held_up_changes_little():
    pace = Pace(most=4096)
    usual = paced(pace, 8.0)
    pace.learn(1000.0, 1000.0, 8.0, 0.0)
    assert pace.room(8.0, PRICES) < 2 * usual


@pytest.fixture(scope="module")
def decoder():
    target = target_of("llama", dtype=torch.float64)
    return GraphDecoder(target, perturbed(target))


def counted(engine, monkeypatch) -> list[int]:
    """Tokens of text in every pass."""
    found, run_pass = [], engine.run

    def counting(segments):
        found.append(sum(len(segment.tokens) for segment in segments if segment.chain))
        return run_pass(segments)

    monkeypatch.setattr(engine, "run", counting)
    return found


@pytest.mark.parametrize("mode", ["auto", "graph", "off"])
def test_target_and_draft_keep_to_one_bound_beside_others(decoder, monkeypatch, mode):
    config, new = GraphConfig(mode=mode, cost="flat"), {"max_new_tokens": 40}
    prompts = [[1, 2, 3], *([place * step % VOCAB for place in range(400)] for step in (3, 5, 7))]
    sequences = [sequence_of(decoder, prompt, new, config, 0) for prompt in prompts]
    batch = Batch(decoder, 8192, 8, chunk=32)
    batch.add(sequences[0])
    batch.step()
    assert sequences[0].began
    read = [counted(engine, monkeypatch) for engine in batch.engines.all]
    for sequence in sequences[1:]:
        batch.add(sequence)
    while not all(sequence.began or sequence.done for sequence in sequences):
        before = [len(passes) for passes in read]
        batch.step()
        if not sequences[0].done:
            assert [sum(passes[count:]) for passes, count in zip(read, before, strict=True)] <= [32, 32]
    run(batch)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, new, 0)


def test_what_a_draft_has_missed_is_read_in_pieces_beside_others(decoder, monkeypatch):
    """A draft that has not been asked for a while begins again, behind long texts."""
    config, new = GraphConfig(mode="graph", cost="flat"), {"max_new_tokens": 60}
    prompts = [[place * step % VOCAB for place in range(300)] for step in (3, 5)]
    sequences = [sequence_of(decoder, prompt, new, config, 0) for prompt in prompts]
    batch = Batch(decoder, 8192, 8, chunk=32)
    for sequence in sequences:
        batch.add(sequence)
    with monkeypatch.context() as patch:
        for place in ("batching.batch", "step"):
            patch.setattr(f"draftgraph.{place}.read_draft", lambda *_: 0)
        while not all(sequence.began for sequence in sequences):
            batch.step()
    read = counted(batch.engines.draft, monkeypatch)
    while batch.busy:
        count = len(read)
        batch.step()
        assert sum(read[count:]) <= 32
    assert sum(read) > 300
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, new, 0)


def test_a_short_prompt_is_answered_while_a_long_one_is_read(decoder):
    config = GraphConfig(mode="off")
    batch = Batch(decoder, 8192, 8, chunk=32)
    stream, long, short = (
        sequence_of(decoder, [1 + place % 9 for place in range(length)], {"max_new_tokens": new}, config, 0)
        for length, new in ((3, 100), (900, 2), (20, 5))
    )
    batch.add(stream)
    batch.step()
    batch.add(long)
    batch.add(short)
    while not short.done:
        batch.step()
    assert not long.began and not stream.done
    run(batch)


def test_seconds_of_flat_prices_are_not_taken_for_those_of_measured_ones(decoder):
    """One stream that never drafts has flat prices, the one after it measured ones."""
    curves = (Curve.of([0], [1, 64, 512], [[1e-3, 1e-3, 8e-3]]) for _ in range(2))
    measured = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    batch = Batch(decoder, 8192, 8)
    for config in (GraphConfig(mode="off"), measured):
        prompts = [[1, 2, 3], [place * 5 % VOCAB for place in range(300)]]
        run(batch, [sequence_of(decoder, prompt, {"max_new_tokens": 30}, config, 0) for prompt in prompts])
    flat, in_seconds = batch._paces[False], batch._paces[True]
    assert flat._plain and in_seconds._plain and in_seconds._plain > 5 * flat._plain
