"""The order in which waiting sequences are let in: turns of tenants, and overtaking that has its end."""

import random
from types import SimpleNamespace

import pytest
import torch
from families import perturbed, target_of
from hypothesis import given
from hypothesis import strategies as st
from test_batch import sequence_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.batching.waiting import OVERTAKEN, Waiting


class Waiter(SimpleNamespace):
    """What the queue looks at of a sequence."""

    __hash__ = object.__hash__

    def __init__(self, tenant: str = "", size: int = 1) -> None:
        super().__init__(tenant=tenant, size=size, overtaken=0)

    def __eq__(self, other: object) -> bool:
        return self is other


def queue_of(waiters) -> Waiting:
    queue = Waiting()
    for one in waiters:
        queue.add(one)
    return queue


def test_tenants_take_turns_and_each_keeps_its_order():
    anna, bob, carl = ([Waiter(name) for _ in range(count)] for name, count in (("anna", 5), ("bob", 2), ("carl", 1)))
    queue = queue_of([*anna, *bob, *carl])
    expected = [anna[0], bob[0], carl[0], anna[1], bob[1], anna[2], anna[3], anna[4]]
    assert list(queue) == expected
    assert [queue.take(lambda _: True) for _ in expected] == expected
    assert not queue and queue.take(lambda _: True) is None


def test_a_tenant_that_comes_late_does_not_wait_for_all_of_another():
    queue = queue_of([Waiter("anna") for _ in range(100)])
    queue.take(lambda _: True)
    late = Waiter("bob")
    queue.add(late)
    assert late in [queue.take(lambda _: True) for _ in range(2)]


def test_one_that_is_put_back_is_the_first_of_its_tenant():
    first, second = Waiter(), Waiter()
    queue = queue_of([first, second])
    queue.put_back(queue.take(lambda _: True))
    assert list(queue) == [first, second]


def test_a_small_one_overtakes_a_large_one_that_does_not_fit():
    large, small = Waiter(size=9), Waiter(size=1)
    queue = queue_of([large, small])
    assert queue.take(lambda one: one.size < 5) is small
    assert large.overtaken == 1 and list(queue) == [large]


def test_one_that_was_overtaken_often_enough_keeps_all_others_waiting():
    large = Waiter("anna", size=9)
    queue = queue_of([large, *(Waiter(name) for name in ("anna", "bob") for _ in range(OVERTAKEN))])
    let_in = [queue.take(lambda one: one.size < 5) for _ in range(OVERTAKEN + 1)]
    assert None not in let_in[:-1] and let_in[-1] is None
    assert queue.take(lambda _: True) is large


@given(seed=st.integers(0, 2**32), room=st.integers(10, 40), flood=st.integers(1, 6))
def test_nobody_starves_however_many_come(seed, room, flood):
    """Texts of random sizes come without end and stay for random times."""
    draw, queue, let_in, running = random.Random(seed), Waiting(), set(), {}

    def fits(one) -> bool:
        return not running or sum(other.size for other in running) + one.size <= room

    watched = [Waiter(draw.choice("abc"), draw.randint(1, room)) for _ in range(5)]
    for step in range(20_000):
        if let_in.issuperset(watched):
            return
        small = [Waiter(draw.choice("abc"), draw.randint(1, 5)) for _ in range(flood)]
        for one in [*watched[step : step + 1], *small]:
            queue.add(one)
        running = {one: left - 1 for one, left in running.items() if left > 1}
        while (one := queue.take(fits)) is not None:
            assert one.overtaken <= OVERTAKEN
            let_in.add(one)
            running[one] = draw.randint(1, 20)
    raise AssertionError("one of them is never let in")


@pytest.fixture(scope="module")
def decoder():
    target = target_of("llama", dtype=torch.float64)
    return GraphDecoder(target, perturbed(target))


def made(decoder, prompt: int, new: int, **more):
    arguments, config = {"max_new_tokens": new}, GraphConfig(mode="off")
    return sequence_of(decoder, [1 + place % 7 for place in range(prompt)], arguments, config, 0, **more)


def steps_until(batch, holds, most=1000) -> int:
    for count in range(most):
        if holds():
            return count
        batch.step()
    raise AssertionError("it never happens")


def test_a_short_text_does_not_wait_for_a_long_one_that_does_not_fit(decoder):
    batch = Batch(decoder, 512, 8)
    running, large, small = made(decoder, 150, 200), made(decoder, 400, 4), made(decoder, 3, 4)
    for sequence in (running, large, small):
        batch.add(sequence)
    assert steps_until(batch, lambda: small.done) < 20 and large in batch.waiting
    steps_until(batch, lambda: large.done)
    assert running.done and large.failure is None


def test_a_long_text_gets_in_however_many_short_ones_come(decoder):
    batch = Batch(decoder, 512, 8)
    large, came = made(decoder, 480, 1), []
    batch.add(made(decoder, 150, 30))
    batch.step()
    batch.add(large)
    while not large.done:
        batch.step()
        came.append(made(decoder, 40, 10))
        batch.add(came[-1])
        assert len(came) < 500
    assert large.overtaken == OVERTAKEN and large.failure is None


def test_texts_of_another_tenant_do_not_wait_for_all_of_the_first(decoder):
    batch = Batch(decoder, 4096, 2)
    anna = [made(decoder, 3, 4, tenant="anna") for _ in range(20)]
    for sequence in anna:
        batch.add(sequence)
    batch.step()
    bob = made(decoder, 3, 4, tenant="bob")
    batch.add(bob)
    steps_until(batch, lambda: bob.done)
    assert sum(sequence.done for sequence in anna) <= 4
