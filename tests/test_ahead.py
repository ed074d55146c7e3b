"""Passes that set off before the one before them was read: everybody gets the tokens that it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import VOCAB, perturbed, target_of
from test_batch import SAMPLED, alone, check_left_behind, run, sequence_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.batching.batch import continue_all
from draftgraph.choose import Outputs
from draftgraph.cost.budget import FlatCost
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.cost.sharing import Experience
from draftgraph.engine import paged
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.capture import Captured
from draftgraph.engine.protocol import PassResult, Segment
from draftgraph.generation import prepare

OFF = GraphConfig(mode="off")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REPEATING = [1, 2, 3, 1, 2]


class WarmedUp(Captured):
    """Computes twice before it is called, as a recording does."""

    def __init__(self, compute: Callable[[], Any], device: torch.device, *more: Any) -> None:
        super().__init__(compute, device, *more)
        if device.type == "cpu":
            compute()
            compute()


@pytest.fixture(scope="module", params=DEVICES)
def decoder(request: pytest.FixtureRequest) -> GraphDecoder:
    dtype = torch.float64 if request.param == "cpu" else torch.bfloat16
    target = target_of("llama", dtype=dtype).to(request.param)
    return GraphDecoder(target, perturbed(target))


@pytest.fixture
def batch_of(decoder: GraphDecoder, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(paged, "Captured", WarmedUp)
    return lambda slots=8192, sequences=8: Batch(decoder, slots, sequences)


class Log(list[str]):
    """What the target's engine is asked for: `run`, or `ahead` where a pass goes on with tokens that nobody has read;
    and `wait`."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        run_pass, mark = engine.run, engine.mark

        def running(segments: Sequence[Segment]) -> list[PassResult]:
            self.append("ahead" if any(segment.follows is not None for segment in segments) else "run")
            return run_pass(segments)  # type: ignore[no-any-return]

        def marking() -> Callable[[], None]:
            wait = mark()
            return lambda: (self.append("wait"), wait())[1]

        monkeypatch.setattr(engine, "run", running)
        monkeypatch.setattr(engine, "mark", marking)


def plain(count: int, seed: int) -> list[Any]:
    """Prompts of mixed lengths, greedy and sampled, some of which end before their length."""
    draw = random.Random(seed)
    jobs = []
    for number in range(count):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 5, 17, 40, 90]))]
        arguments = {"max_new_tokens": draw.choice([1, 2, 20, 33]), "eos_token_id": draw.choice([None, [3, 4, 5]])}
        jobs.append((prompt, arguments | (SAMPLED if number % 2 else {}), OFF, number))
    return jobs


def check(decoder: GraphDecoder, sequences: list[Any], jobs: list[Any]) -> None:
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)


def test_the_next_pass_sets_off_before_the_host_reads_this_one(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of()
    log = Log(batch.engines.target, monkeypatch)
    jobs = [([1, 2, number], {"max_new_tokens": 6}, OFF, number) for number in range(3)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    run(batch, sequences)
    # The prompts, their last tokens, which nobody had to choose, and then each pass before the wait for the last one.
    assert log == ["run", "run", *(5 * ["wait", "ahead"]), "wait", "wait"]
    check(decoder, sequences, jobs)


def test_sequences_join_end_and_leave(decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, draw = plain(40, seed=1), random.Random(2)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(2048, 6)
    log = Log(batch.engines.target, monkeypatch)
    coming, gone, told = list(sequences), [], {sequence: [] for sequence in sequences}
    while coming or batch.busy:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if coming:
                batch.add(coming.pop(0))
        if batch.running and draw.random() < 0.05:
            gone.append(draw.choice(batch.running))
            batch.remove(gone[-1])
        for sequence, step in batch.step().steps:
            assert step is not None
            told[sequence] += step.tokens
    assert gone and log.count("ahead") > log.count("run")
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        expected = alone(decoder, prompt, arguments, seed)
        assert told[sequence] == sequence.new_tokens == expected[: len(told[sequence])]
        assert sequence in gone or told[sequence] == expected
    check_left_behind(batch)


@pytest.mark.parametrize("slots", [300, 400])
def test_where_pages_are_short_nothing_is_lost_or_doubled(decoder: GraphDecoder, batch_of: Any, slots: int) -> None:
    jobs = plain(24, seed=3)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(slots, 6)
    run(batch, sequences)
    assert any(sequence.put_back for sequence in sequences)
    check(decoder, sequences, jobs)
    check_left_behind(batch)


@pytest.mark.parametrize("every", [1, 3])
def test_a_token_that_the_host_would_not_have_chosen_is_not_gone_on_with(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    jobs = plain(12, seed=4)
    expected = [alone(decoder, prompt, arguments, seed) for prompt, arguments, _, seed in jobs]
    chosen, asked = PassResult.chosen.fget, [0]  # type: ignore[attr-defined]

    def sometimes_another(result: PassResult) -> int:
        asked[0] += 1
        return int(chosen(result)) if asked[0] % every else VOCAB

    monkeypatch.setattr(PassResult, "chosen", property(sometimes_another))
    sequences = [sequence_of(decoder, *job) for job in jobs]
    run(batch_of(), sequences)
    assert asked[0] and [sequence.new_tokens for sequence in sequences] == expected


def test_a_pass_ahead_with_another_token_would_be_noticed(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the device goes on with the token after the chosen one."""
    jobs = plain(12, seed=4)
    batch = batch_of()
    run_pass = batch.engines.target.run

    def shifted(segments: Sequence[Segment]) -> Any:
        batch.engines.target._chosen.add_(1).remainder_(VOCAB)
        return run_pass(segments)

    monkeypatch.setattr(batch.engines.target, "run", shifted)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    run(batch, sequences)
    with pytest.raises(AssertionError):
        check(decoder, sequences, jobs)


@pytest.mark.parametrize("more", ["logprobs", "penalty", "prompt scores", "many of top-k"])
def test_who_reads_logits_is_waited_for(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    scores: list[torch.Tensor] = []
    arguments: dict[str, Any] = {"max_new_tokens": 12}
    options: dict[str, Any] = {}
    if more == "logprobs":
        options["outputs"] = Outputs(keep_logprobs=True)
    if more == "prompt scores":
        options["on_prompt"] = lambda logits: scores.append(logits.clone())
    if more == "penalty":
        arguments["repetition_penalty"] = 1.3
    if more == "many of top-k":
        monkeypatch.setattr(paged, "MOST_KEPT", 4)
        arguments |= {"do_sample": True, "top_k": 8}
    prompt = [5, 6, 7, 8, 9]
    one = sequence_of(decoder, prompt, arguments, OFF, 0, **options)
    jobs = [([1, 2, number], {"max_new_tokens": 20}, OFF, number) for number in range(3)]
    others = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of()
    log = Log(batch.engines.target, monkeypatch)
    run(batch, [*others, one])
    assert "ahead" in log, "once the others are alone, or the prompt is read"
    check(decoder, others, jobs)
    assert one.new_tokens == alone(decoder, prompt, arguments, 0)
    if more == "logprobs":
        found = decoder.generate(torch.tensor([prompt]), config=OFF, logprobs=True, **arguments)
        assert found.logprobs is not None
        assert one.outputs.logprobs == pytest.approx(found.logprobs[0], abs=1e-6)
    if more == "prompt scores":
        logits = decoder.target_model(torch.tensor([prompt], device=decoder.engines.target.device)).logits[0, :-1]
        tolerance = 1e-6 if logits.dtype == torch.float64 else 0.1
        torch.testing.assert_close(torch.cat(scores), logits, atol=tolerance, rtol=0)


def test_who_drafts_by_the_clock_goes_ahead_while_it_does_not(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = (Curve.of([0], [1, 64], [[seconds, seconds]]) for seconds in (1e-2, 1e-5))
    measured = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    jobs = [(REPEATING * 8, {"max_new_tokens": 40}, measured, number) for number in range(6)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of()
    log, drafted = Log(batch.engines.target, monkeypatch), 0
    for sequence in sequences:
        batch.add(sequence)
    for step in range(200):
        decoder.experience.habit(6).drafts = step % 8 > 4
        drafted += bool(batch.step().drafting) if batch.busy else 0
    assert drafted and "ahead" in log and not batch.busy
    check(decoder, sequences, jobs)


def test_one_alone_goes_ahead_too(decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone_static = GraphDecoder(decoder.target_model, config=OFF)
    log = Log(alone_static.engines.target, monkeypatch)
    prompt = torch.tensor([[1, 2, 3, 4]])
    for arguments in ({}, SAMPLED, {"eos_token_id": [3, 4, 5]}):
        expected = alone(decoder, prompt[0].tolist(), {"max_new_tokens": 30, **arguments}, 7)
        found = alone_static.generate(prompt, seed=7, max_new_tokens=30, **arguments)
        assert found.new_token_ids[0] == expected
        begun = alone_static.generate(prompt, seed=7, max_new_tokens=9, **arguments)
        assert begun.new_token_ids[0] == expected[:9]
    assert log.count("ahead") > 60


def test_what_is_under_way_is_forgotten_with_a_step_that_failed(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short when the host waits, and the next pass has set off already."""
    jobs = plain(10, seed=5)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch, waits = batch_of(), [0]
    mark = batch.engines.target.mark

    def marking() -> Callable[[], None]:
        wait = mark()

        def waiting() -> None:
            waits[0] += 1
            if waits[0] % 9 == 0:
                raise torch.OutOfMemoryError("planted")
            wait()

        return waiting

    monkeypatch.setattr(batch.engines.target, "mark", marking)
    told: dict[Any, list[int]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        batch.add(sequence)
    while batch.busy:
        for sequence, step in batch.step().steps:
            told[sequence] += step.tokens if step else []
    failed = [sequence for sequence in sequences if sequence.failure is not None]
    assert failed and len(failed) < len(sequences)
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        expected = alone(decoder, prompt, arguments, seed)
        assert told[sequence] == sequence.new_tokens == expected[: len(told[sequence])]
        assert sequence in failed or told[sequence] == expected
    check_left_behind(batch)


def test_texts_that_are_being_read_count_when_it_is_decided_whether_to_draft(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few that draft would make steps long, in which prompts are read, and so stay few."""
    curves = (Curve.of([0], [1, 64], [[seconds, seconds]]) for seconds in (1e-2, 1e-5))
    measured = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    prompts = [REPEATING, *([place * step % VOCAB for place in range(300)] for step in range(2, 12))]
    sequences = [sequence_of(decoder, prompt, {"max_new_tokens": 60}, measured, 0) for prompt in prompts]
    batch = Batch(decoder, 8192, 16, batch_of().engines, chunk=32)
    monkeypatch.setattr(decoder, "experience", Experience())
    for texts in (2, 4):
        decoder.experience.habit(texts).drafts = True
    for sequence in sequences:
        batch.add(sequence)
    begun, drafted = [], []
    while batch.busy:
        begun.append(sum(sequence.began for sequence in batch.running))
        drafted.append(batch.step().drafting)
    few = [count for texts, count in zip(begun, drafted, strict=True) if texts < 8]
    assert 4 in begun and not any(few[: begun.index(8)]), "eleven do not draft until that has been tried"


FLAT = GraphConfig(mode="off", cost=FlatCost())  # reading costs nothing: as much is read as there is


def drawn(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]


def test_a_long_prompt_is_not_read_ahead_over_what_the_host_has_not_read(decoder: GraphDecoder, batch_of: Any) -> None:
    """A text ends while another has more to read than one pass holds, whose second half has the sides of this pass."""
    draw, batch = random.Random(0), batch_of()
    for seed in range(3):  # the first widens the table of pages
        jobs = [(drawn(draw, length), {"max_new_tokens": 2}, FLAT, seed) for length in (5, 3800)]
        sequences = [sequence_of(decoder, *job) for job in jobs]
        run(batch, sequences)
        check(decoder, sequences, jobs)


def test_more_texts_than_one_pass_holds_do_not_go_ahead(decoder: GraphDecoder, batch_of: Any) -> None:
    draw, hot = random.Random(0), {"max_new_tokens": 8, "do_sample": True, "temperature": 1.5}
    jobs = [(drawn(draw, 9), hot, FLAT, number) for number in range(70)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(16384, 100)
    for sequence in sequences[:60]:
        batch.add(sequence)
    for _ in range(3):
        batch.step()
    run(batch, sequences[60:])
    check(decoder, sequences[50:], jobs[50:])


def test_memory_that_is_short_for_a_recording_ahead_costs_nobody_a_token(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is short after a first warm-up, which has written its tokens where the next pass looks for them."""
    planted: list[bool] = []

    class Short(WarmedUp):
        def __init__(self, compute: Callable[[], Any], device: torch.device, *more: Any) -> None:
            super().__init__(compute, device, *more)
            if planted == [True]:
                planted.append(False)
                raise torch.OutOfMemoryError("planted")

    draw, hot = random.Random(0), {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5}
    jobs = [(drawn(draw, length), hot, FLAT, length) for length in (9, 9, 9, 9, 9, 60, 60)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(16384, 16)
    monkeypatch.setattr(paged, "Captured", Short)
    for sequence in sequences[:5]:
        batch.add(sequence)
    for _ in range(5):
        batch.step()
    passes = batch.engines.target._passes
    batch.engines.target._passes = {shape: known for shape, known in passes.items() if shape.nodes < 64}
    planted.append(True)
    run(batch, sequences[5:])
    assert len(planted) == 2
    check(decoder, sequences, jobs)


def test_passes_of_others_between_two_steps_are_noticed(decoder: GraphDecoder, batch_of: Any) -> None:
    """As when prices are measured for a new request."""
    jobs = [([1, 2, 3], {"max_new_tokens": 20}, OFF, 0)]
    sequences, batch = [sequence_of(decoder, *job) for job in jobs], batch_of()
    batch.add(sequences[0])
    while batch.busy:
        batch.step()
        context = batch.engines.target.open()
        with Loan(decoder.target_model):
            for _ in range(2):
                batch.engines.target.run([Segment.of_root(context, 7, None, 0, None)])
                context.forget(0)
        context.rewind(0)
        context.close()
    check(decoder, sequences, jobs)


def test_a_decoding_goes_on_after_others_have_used_its_engines(decoder: GraphDecoder, batch_of: Any) -> None:
    static, arguments = GraphDecoder(decoder.target_model), {"max_new_tokens": 24} | SAMPLED
    prompt = torch.tensor([[1, 2, 3, 4]], device=static.engines.target.device)
    expected = alone(decoder, prompt[0].tolist(), arguments, 5)
    decoding = static.start(prepare(static.target_model, prompt, None, **arguments), 0, 5, config=OFF)
    for _ in range(5):
        decoding.step()
    continue_all(static, [sequence_of(static, [1, 2, number], arguments, OFF, number) for number in range(2)])
    while decoding.finish_reason is None:
        decoding.step()
    assert decoding.new_tokens == expected


def test_who_sits_a_pass_out_drafts_behind_its_own_text(
    decoder: GraphDecoder, batch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = (Curve.of([0], [1, 64], [[seconds, seconds]]) for seconds in (1e-2, 1e-5))
    measured = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    prompts = [[(number * step + step) % VOCAB for step in range(30)] for number in range(6)]
    jobs = [(prompt, {"max_new_tokens": 40}, measured, number) for number, prompt in enumerate(prompts)]
    expected = [alone(decoder, prompt, arguments, seed) for prompt, arguments, _, seed in jobs]
    chosen, asked = PassResult.chosen.fget, [0]  # type: ignore[attr-defined]

    def sometimes_another(result: PassResult) -> int:
        asked[0] += 1
        return int(chosen(result)) if asked[0] % 4 else VOCAB

    monkeypatch.setattr(PassResult, "chosen", property(sometimes_another))
    monkeypatch.setattr(decoder, "experience", Experience())
    sequences, batch = [sequence_of(decoder, *job) for job in jobs], batch_of()
    for sequence in sequences:
        batch.add(sequence)
    for step in range(200):
        decoder.experience.habit(6).drafts = step % 5 > 2
        if batch.busy:
            batch.step()
    assert asked[0] > 8 and [sequence.new_tokens for sequence in sequences] == expected
