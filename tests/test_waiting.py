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
from draftgraph.batching import Batch, Job, Limits, Scheduler
from draftgraph.batching.batch import PUT_BACK
from draftgraph.batching.waiting import OVERTAKEN, Waiting
from draftgraph.cost.reading import Pace
from draftgraph.pair import Pair


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


def test_texts_of_tenants_that_have_nothing_running_overtake_it_only_so_often_too():
    large, fitting = Waiter("anna", size=9), Waiter("anna", size=1)
    queue, let_in = queue_of([large, fitting]), []
    for number in range(OVERTAKEN + 1):
        queue.add(Waiter(f"tenant {number}", size=1))
        let_in.append(queue.take(lambda one: one.size < 5, running={"anna"}))
    assert None not in let_in[:-1] and let_in[-1] is None
    assert fitting.overtaken == 0  # it fits, but tenants that have nothing running come first
    assert queue.take(lambda _: True, running={"anna"}) is large


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
        while (one := queue.take(fits, {one.tenant for one in running})) is not None:
            assert one.overtaken <= OVERTAKEN
            let_in.add(one)
            running[one] = draw.randint(1, 20)
    raise AssertionError("one of them is never let in")


@pytest.fixture(autouse=True)
def fixed_pace(monkeypatch):
    """Steps read as much of prompts, however busy the machine is."""
    monkeypatch.setattr(Pace, "room", lambda self, others, reading: 64)


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


class TestGivingWay:
    """A tenant that has taken all places gives one up for the first text of another."""

    def batch_of(self, decoder, tenant="anna", texts=4, places=4, slots=4096, prompt=20, new=120):
        batch = Batch(decoder, slots, places)
        sequences = [made(decoder, prompt + place, new, tenant=tenant) for place in range(texts)]
        for sequence in sequences:
            batch.add(sequence)
        for _ in range(12):
            batch.step()
        return batch, sequences

    @pytest.mark.parametrize(("places", "slots", "prompt"), [(4, 4096, 20), (8, 512, 75)])  # places or pages are short
    def test_another_tenant_gets_its_first_token_within_a_few_steps(self, decoder, places, slots, prompt):
        batch, anna = self.batch_of(decoder, texts=6, places=places, slots=slots, prompt=prompt)
        bob = made(decoder, 40, 30, tenant="bob")
        batch.add(bob)
        assert steps_until(batch, lambda: bool(bob.new_tokens)) <= 5
        steps_until(batch, lambda: bob.done)
        assert not any(sequence.done for sequence in anna)
        assert bob.new_tokens == alone(decoder, bob)

    def test_a_text_goes_on_with_the_tokens_that_it_would_have_had(self, decoder):
        batch, anna = self.batch_of(decoder)
        told = {sequence: list(sequence.new_tokens) for sequence in anna}
        batch.add(made(decoder, 40, 8, tenant="bob"))
        while batch.busy:
            for sequence, step in batch.step().steps:
                told.setdefault(sequence, []).extend(step.tokens)
        assert [sequence.put_back for sequence in anna] == [0, 0, 0, 1]  # the newest, once
        for sequence in anna:
            assert told[sequence] == sequence.new_tokens == alone(decoder, sequence) and sequence.failure is None

    def test_no_text_is_put_back_again_and_again(self, decoder):
        batch, anna = self.batch_of(decoder, new=60)
        while not any(sequence.done for sequence in anna):
            if not batch.waiting:
                batch.add(made(decoder, 3, 2, tenant="bob"))
            batch.step()
        assert max(sequence.put_back for sequence in anna) == PUT_BACK
        steps_until(batch, lambda: all(sequence.done for sequence in anna))
        assert [sequence.new_tokens for sequence in anna] == [alone(decoder, sequence) for sequence in anna]

    @pytest.mark.parametrize(("places", "texts"), [(1, 1), (4, 4)])
    def test_nobody_gives_up_the_only_place_of_a_tenant(self, decoder, places, texts):
        batch = Batch(decoder, 4096, places)
        running = [made(decoder, 5, 20, tenant=f"tenant {number}") for number in range(texts)]
        for sequence in running:
            batch.add(sequence)
        batch.step()
        batch.add(made(decoder, 5, 2, tenant="another"))
        steps_until(batch, lambda: running[0].done)
        assert not any(sequence.put_back for sequence in running)

    def test_a_tenant_that_has_a_text_running_waits_for_a_place(self, decoder):
        batch, anna = self.batch_of(decoder)
        bob = [made(decoder, 5, 20, tenant="bob") for _ in range(3)]
        for sequence in bob:
            batch.add(sequence)
        steps_until(batch, lambda: bob[0].done)
        assert sum(sequence.put_back for sequence in anna) == 1 and not any(one.new_tokens for one in bob[2:])

    def test_nobody_is_put_back_for_a_text_that_would_not_fit_even_so(self, decoder):
        batch, anna = self.batch_of(decoder, slots=512)
        batch.add(made(decoder, 500, 1, tenant="bob"))
        batch.step()
        assert not any(sequence.put_back for sequence in anna)

    def batch_of_readers(self, decoder, texts, slots):
        """Each begins to read when those before it are writing."""
        batch, sequences = Batch(decoder, slots, 8), []
        for place in range(texts):
            sequences.append(made(decoder, 192, 100 + place, tenant="anna"))
            batch.add(sequences[-1])
            steps_until(batch, lambda: bool(sequences[-1].new_tokens))
        return batch, sequences

    def test_nobody_is_put_back_whose_pages_others_hold_too(self, decoder, monkeypatch):
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")  # texts that begin alike share pages
        batch, anna = self.batch_of_readers(decoder, texts=4, slots=512)
        assert all(sequence.reused >= 160 for sequence in anna[1:])
        bob = made(decoder, 350, 5, tenant="bob")  # all four have 768 tokens, but three of them would leave few pages
        batch.add(bob)
        batch.step()
        assert not any(sequence.put_back for sequence in anna) and bob.overtaken == 0
        steps_until(batch, lambda: bob.done)
        assert bob.failure is None

    def test_who_gave_way_does_not_take_the_room_back_before_it_is_used(self, decoder):
        batch, anna = self.batch_of_readers(decoder, texts=2, slots=512)
        bob = made(decoder, 220, 5, tenant="bob")
        batch.add(bob)
        steps_until(batch, lambda: bob.done)
        assert [sequence.put_back for sequence in (*anna, bob)] == [0, 1, 0] and anna[1] not in batch.running
        steps_until(batch, lambda: all(sequence.done for sequence in anna))

    def test_the_texts_of_one_key_are_those_of_one_tenant_whatever_they_reuse(self, decoder):
        pair = Pair(decoder.target_model, decoder.draft_model, None, GraphConfig(cost="flat"))
        scheduler = Scheduler(pair, Limits(texts=3, slots=4096))
        for number in range(9):
            scheduler.submit(Job(f"anna {number}", (1, 2), tenant="anna", cache_salt=str(number), max_tokens=200))
        scheduler.step()
        scheduler.submit(Job("bob", (1, 2), tenant="bob", max_tokens=3))
        told = [one for _ in range(12) for one in scheduler.step()]
        assert [one.finish_reason for one in told if one.id == "bob"][-1] == "length"
        assert {one.id for one in told} <= {"anna 0", "anna 1", "anna 2", "bob"}


def alone(decoder, sequence):
    prompt, new = torch.tensor([sequence.text[: sequence.prompt_length]]), sequence.max_length - sequence.prompt_length
    return decoder.generate(prompt, max_new_tokens=new, config=GraphConfig(mode="off")).new_token_ids[0]
