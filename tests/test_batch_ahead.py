"""Sequences of a batch whose drafts set off together after every step: each gets the tokens that it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import VOCAB, perturbed, target_of
from test_batch import alone, asked, check_left_behind, run, sequence_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.cost import FlatCost
from draftgraph.proposers.device_draft import DeviceDraft, DeviceDrafts
from draftgraph.proposers.policies import DevicePolicy
from draftgraph.sequence import Sequence

FREE = GraphConfig(cost=FlatCost())  # drafting costs nothing: as deep as it may be


@pytest.fixture(scope="module")
def decoder() -> GraphDecoder:
    target = target_of("llama", dtype=torch.float64)
    return GraphDecoder(target, perturbed(target, 0.1))


@pytest.fixture
def batch_of(decoder: GraphDecoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    return lambda slots=8192, sequences=8: Batch(decoder, slots, sequences)


def asked_for_free(count: int, seed: int) -> list[Any]:
    """In all modes; mode auto drafts as deep as it may."""
    jobs = asked(count, seed, longest=60)
    return [
        (prompt, arguments, FREE if config.mode == "auto" else config, number)
        for prompt, arguments, config, number in jobs
    ]


@pytest.mark.parametrize("slots", [8192, 512])  # plenty, and so few that sequences have to make room for others
def test_every_sequence_gets_what_it_would_get_alone(decoder: GraphDecoder, batch_of: Any, slots: int) -> None:
    jobs = asked_for_free(24, seed=5)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    together = batch_of(slots)
    together.prepare(FREE)
    run(together, sequences)
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(together)
    if slots > 512:
        drafted = sum(
            sequence.stats.accepted_by_source["draft"] for sequence in sequences if sequence.config.mode == "auto"
        )
        assert drafted > 20


def test_sequences_join_and_leave_at_any_step(decoder: GraphDecoder, batch_of: Any) -> None:
    jobs, draw = asked_for_free(24, seed=6), random.Random(2)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    together, coming, gone = batch_of(2048, 6), list(sequences), []
    while coming or together.busy:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if coming:
                together.add(coming.pop())
        if draw.random() < 0.1 and (present := [*together.running, *together.waiting]):
            gone.append(draw.choice(present))
            together.remove(gone[-1])
        together.step()
    assert gone
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        if sequence not in gone:
            assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(together)


def of_auto(decoder: GraphDecoder, count: int, config: GraphConfig = FREE, tokens: int = 20) -> list[Sequence]:
    return [
        sequence_of(decoder, [1 + number, 5, 9], {"max_new_tokens": tokens}, config, number) for number in range(count)
    ]


def test_all_drafts_of_a_step_are_one_run(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, sequences, started = batch_of(), of_auto(decoder, 4), []
    start = DeviceDrafts.launch
    monkeypatch.setattr(DeviceDrafts, "launch", lambda *given: started.append(len(given[1])) or start(*given))
    run(together, sequences)
    assert started[0] == 4 and len(started) <= max(sequence.stats.steps for sequence in sequences) + 1
    for sequence in sequences:
        assert isinstance(sequence.policy, DevicePolicy) and isinstance(sequence.draft, DeviceDraft)
        assert sequence.stats.mean_accepted_length > 1.2
        assert sequence.stats.draft_passes == sequence.draft.passes > 0


def test_a_sequence_that_joins_starts_its_draft_with_the_others(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one run: a second one of the same size would write over what the first has drafted."""
    together, sequences, started = batch_of(), of_auto(decoder, 3, tokens=80), []
    start = DeviceDrafts.launch
    monkeypatch.setattr(DeviceDrafts, "launch", lambda *given: started.append(len(given[1])) or start(*given))
    for sequence in sequences:
        together.add(sequence)
        together.step()
        together.step()
    assert started == [1, 1, 2, 2, 3, 3]
    run(together)


def test_drafts_have_set_off_before_the_last_step_is_learnt_from(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, happened = batch_of(), []
    start, remember = DeviceDrafts.launch, Sequence.remember
    monkeypatch.setattr(DeviceDrafts, "launch", lambda *given: happened.append("start") or start(*given))
    monkeypatch.setattr(Sequence, "remember", lambda self: happened.append("remember") or remember(self))
    run(together, of_auto(decoder, 2, tokens=8))
    assert happened[:4] == ["start", "start", "remember", "remember"]


class Dear(FlatCost):
    """A draft that never pays."""

    def __init__(self) -> None:
        super().__init__(draft=1e6)


def test_a_sequence_without_reason_to_draft_does_not(decoder: GraphDecoder, batch_of: Any) -> None:
    together = batch_of()
    sequences = [*of_auto(decoder, 2), *of_auto(decoder, 2, GraphConfig(cost=Dear()))]
    run(together, sequences)
    assert [sequence.draft.passes > 0 for sequence in sequences if sequence.draft] == [True, True, False, False]
    for number, sequence in enumerate(sequences):
        assert sequence.new_tokens == alone(decoder, [1 + number % 2, 5, 9], {"max_new_tokens": 20}, number % 2)


def test_a_sequence_among_others_drafts_the_tree_that_it_drafts_alone(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures, with memories and calibration of their own."""
    target, draft = decoder.target_model, decoder.draft_model
    figures = []
    for batched in (False, True):
        fresh = GraphDecoder(target, draft)
        arguments: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7}
        if not batched:
            stats = fresh.generate(torch.tensor([[3, 5, 9]]), seed=0, config=FREE, **arguments).stats
        else:
            sequence = sequence_of(fresh, [3, 5, 9], arguments, FREE, 0)
            together = Batch(fresh, 8192, 4)
            assert together.engines.device_drafts(FREE) is not None
            run(together, [sequence])
            stats = sequence.stats
        figures.append((stats.steps, stats.new_tokens, stats.verified_tokens, stats.accepted_by_source))
    assert figures[0] == figures[1]


def test_ends_of_a_sequence_are_its_own(decoder: GraphDecoder, batch_of: Any) -> None:
    together, arguments = batch_of(), {"max_new_tokens": 30, "eos_token_id": [number for number in range(0, VOCAB, 3)]}
    sequences = [sequence_of(decoder, [2, 4, 1], arguments, FREE, 0), *of_auto(decoder, 2)]
    run(together, sequences)
    assert sequences[0].new_tokens == alone(decoder, [2, 4, 1], arguments, 0)
    assert sequences[1].new_tokens == alone(decoder, [1, 5, 9], {"max_new_tokens": 20}, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 20])  # sequences: 1, 4 and 64 of a program, and fewer as they leave
def test_every_sequence_gets_what_it_would_get_alone_on_a_gpu(count: int) -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.1).cuda()
    decoder = GraphDecoder(target.cuda(), draft)
    jobs = [job for job in asked_for_free(40, seed=7) if job[2].mode in ("auto", "off")][:count]
    expected = [alone(decoder, prompt, arguments, seed) for prompt, arguments, _, seed in jobs]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    together = Batch(decoder, 16384, count)
    assert together.engines.device_drafts(FREE) is not None
    run(together, sequences)
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.new_tokens == tokens
    check_left_behind(together)
