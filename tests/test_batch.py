"""Many sequences together: each gets the tokens that it would get alone, whatever shares its batch."""

import random
from itertools import count

import pytest
import torch
import transformers
from families import FAMILIES, MORE_FAMILIES, SMALL, VOCAB, perturbed, target_of
from transformers import LogitsProcessor, LogitsProcessorList

from draftgraph import GraphConfig, GraphDecoder
from draftgraph import step as stepping
from draftgraph.batching import Batch
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.cost.sharing import Experience
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Segment
from draftgraph.engine.selfcheck import engine_for
from draftgraph.generation import prepare
from draftgraph.kernels.attention import View
from draftgraph.sequence import Sequence

MODES = ("auto", "graph", "tree", "chain", "off")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def target():
    return target_of("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def decoder(target):
    return GraphDecoder(target, perturbed(target))


@pytest.fixture(params=["exact", "static"])
def batch_of(request, monkeypatch):
    """Makes batches, with passes as wide as their nodes or of fixed shapes, as they are captured on a GPU."""

    def made(decoder, slots, sequences):
        with monkeypatch.context() as patch:
            if request.param == "static":
                patch.setenv("DRAFTGRAPH_ENGINE", "static")
            return Batch(decoder, slots, sequences)

    return made


SHAPES = pytest.mark.parametrize("captured", [False, True], ids=["exact", "static"])


def asked(count, seed=0, longest=90):
    """Prompts of mixed lengths and repetitions, greedy and sampled, in all modes."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        words = [draw.randrange(VOCAB) for _ in range(draw.choice([3, 7, 40]))]
        prompt = (words * longest)[: draw.choice([1, 2, 15, 17, longest])]
        arguments = {"max_new_tokens": draw.choice([1, 3, 20, 33])} | (SAMPLED if draw.random() < 0.5 else {})
        found.append((prompt, arguments, GraphConfig(mode=draw.choice(MODES), cost="flat"), number))
    return found


def alone(decoder, prompt, arguments, seed):
    ids, plain = torch.tensor([prompt]), GraphConfig(mode="off")
    mask = torch.ones_like(ids)
    return decoder.generate(ids, attention_mask=mask, seed=seed, config=plain, **arguments).new_token_ids[0]


def sequence_of(decoder, prompt, arguments, config, seed, **more):
    ids = torch.tensor([prompt], device=decoder.engines.target.device)
    request = prepare(decoder.target_model, ids, None, **arguments)
    return Sequence(request, seed, config, **more)


def run(batch, sequences=()):
    for sequence in sequences:
        batch.add(sequence)
    while batch.busy:
        for sequence, _ in batch.step().steps:
            if sequence.failure is not None:
                raise sequence.failure


def check_left_behind(batch):
    assert not batch.running and not batch.waiting
    assert [engine.used for engine in batch.engines.all] == [0] * len(batch.engines.all)


def test_memory_that_is_short_when_the_draft_catches_up_costs_nobody_a_token(decoder, monkeypatch):
    """The step before has been taken, and the next does without a draft: nobody has to leave."""
    jobs = [([1, 5, 9, number], {"max_new_tokens": 40}, GraphConfig(mode="graph"), number) for number in range(4)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch, read_draft, raised = Batch(decoder, 4096, 4), stepping.read_draft, []

    def short(sequences, engines, room, late=0):
        if late and len(raised) < 2 and any(sequence.new_tokens for sequence in sequences):
            raised.append(late)
            raise torch.OutOfMemoryError
        return read_draft(sequences, engines, room, late)

    monkeypatch.setattr(stepping, "read_draft", short)
    told = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        batch.add(sequence)
    while batch.busy:
        for sequence, step in batch.step().steps:
            told[sequence] += step.tokens if step else []
    assert len(raised) == 2
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.failure is None
        assert told[sequence] == sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize("slots", [16384, 512])  # plenty, and so few that the draft cannot read all
def test_a_sequence_that_drafts_only_later_is_read_by_the_draft_then(decoder, batch_of, slots, monkeypatch):
    curves = (Curve.of([0], [1, 64], [[seconds, seconds]]) for seconds in (1e-2, 1e-5))
    free = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    jobs = [(prompt, arguments, free, seed) for prompt, arguments, _, seed in asked(12, seed=4)]
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, slots, 12)
    monkeypatch.setattr(decoder, "experience", Experience())
    habits = [decoder.experience.habit(2**size) for size in range(5)]
    for sequence in sequences:
        batch.add(sequence)
    for step in count():
        for habit in habits:
            habit.drafts = step % 10 > 2
        if not batch.busy:
            break
        batch.step()
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)
    if slots > 512:
        assert sum(sequence.stats.accepted_by_source["draft"] for sequence in sequences) > 0


@pytest.mark.parametrize("slots", [16384, 512])  # plenty, and so few that sequences have to make room for others
def test_every_sequence_gets_what_it_would_get_alone(decoder, slots, batch_of):
    jobs = asked(30)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, slots, sequences=8)
    run(batch, sequences)
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


def test_sequences_join_and_leave_at_any_step(decoder, batch_of):
    jobs, draw = asked(40, seed=1), random.Random(2)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch, coming, gone = batch_of(decoder, 2048, sequences=6), list(sequences), []
    while coming or batch.busy:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if coming:
                batch.add(coming.pop())
        if draw.random() < 0.1 and (present := [*batch.running, *batch.waiting]):
            gone.append(draw.choice(present))
            batch.remove(gone[-1])
        batch.step()
    assert gone
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        if sequence not in gone:
            assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


def test_sequences_that_give_way_to_other_tenants_lose_and_repeat_no_token(decoder, batch_of):
    jobs = asked(24, seed=5)
    sequences = [sequence_of(decoder, *job, tenant="" if job[-1] % 2 else f"{job[-1]}") for job in jobs]
    batch, coming, told = batch_of(decoder, 2048, sequences=4), sequences[::2], {one: [] for one in sequences}
    for sequence in sequences[1::2]:
        batch.add(sequence)
    while batch.busy:
        for sequence, step in batch.step().steps:
            told[sequence] += step.tokens
        if coming and (not batch.waiting or [one.tenant for one in batch.running] == 4 * [""]):
            batch.add(coming.pop())
    assert not coming and sum(sequence.put_back for sequence in sequences) > 3
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert told[sequence] == sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES))
def test_every_family_in_a_batch(family, batch_of):
    target = target_of(family)
    decoder = GraphDecoder(target, perturbed(target))
    jobs = asked(5, seed=3, longest=40)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, 4096, sequences=3)
    run(batch, sequences)
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"]
)
@SHAPES
def test_common_families_share_their_passes(family, captured, monkeypatch):
    if captured:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    engine = engine_for(target_of(family), 1024)
    assert isinstance(engine, PagedEngine) and engine.captured == captured


def test_a_model_whose_sequences_cannot_share_a_pass_is_said_and_works(capsys):
    assert isinstance(engine_for(target_of("falcon"), 1024), EagerEngine)
    assert "reads one text at a time, and slower" in capsys.readouterr().err


@pytest.mark.parametrize("length", [30, 60, 90])
@pytest.mark.parametrize("family", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_changes_with_the_length(family, length, batch_of):
    rope, window = {"rope_type": family, "rope_theta": 10000.0, "factor": 4.0}, {"max_position_embeddings": 64}
    if family == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
        rope, window = rope | factors, {"original_max_position_embeddings": 64, "sliding_window": None}
    config = transformers.Phi3Config if family == "longrope" else transformers.LlamaConfig
    torch.manual_seed(0)
    target = (
        transformers.AutoModelForCausalLM.from_config(config(**SMALL | window, rope_parameters=rope)).double().eval()
    )
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.mul_(5.0)
    decoder = GraphDecoder(target, perturbed(target))
    prompts = [[number * number % VOCAB for number in range(length + more)] for more in (0, 9)]
    sequences = [
        sequence_of(decoder, prompt, {"max_new_tokens": 24}, GraphConfig(cost="flat"), 0) for prompt in prompts
    ]
    run(batch_of(decoder, 4096, sequences=2), sequences)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, {"max_new_tokens": 24}, 0)


@SHAPES
def test_a_planted_leak_between_sequences_is_found(monkeypatch, captured):
    def leaking(view, states):
        count = view.slots.stop - view.slots.start if isinstance(view.slots, slice) else len(view.slots)
        return states[:, :, :count]

    if captured:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(View, "of", leaking)
    assert isinstance(engine_for(target_of("llama", dtype=torch.float64), 1024), EagerEngine)


def test_a_pass_over_many_texts_is_one_pass(decoder, batch_of):
    batch, passes = batch_of(decoder, 4096, sequences=8), []
    hook = decoder.target_model.register_forward_pre_hook(lambda *_: passes.append(1))
    plain = GraphConfig(mode="off")
    run(batch, [sequence_of(decoder, [1, 2, 3], {"max_new_tokens": 5}, plain, seed) for seed in range(8)])
    hook.remove()
    assert len(passes) == 6  # the prompts, and a pass for every token


def test_drafts_of_many_sequences_share_their_passes(decoder, monkeypatch, batch_of):
    batch = batch_of(decoder, 4096, sequences=4)
    segments = []
    draft_run = batch.engines.draft.run
    monkeypatch.setattr(batch.engines.draft, "run", lambda given: segments.append(len(given)) or draft_run(given))
    chain = GraphConfig(mode="chain", chain_length=3)
    run(batch, [sequence_of(decoder, [1, 2, 3], {"max_new_tokens": 12}, chain, 0) for _ in range(4)])
    assert segments[0] == 4 and set(segments) == {4}


class TestPrefixes:
    def test_a_beginning_is_read_once(self, decoder, batch_of):
        prompt = [number % VOCAB for number in range(4 * PAGE)]
        batch = batch_of(decoder, 4096, sequences=2)
        first, second, other = (
            sequence_of(decoder, [*prompt, last], {"max_new_tokens": 8}, GraphConfig(), 0, tenant=tenant)
            for last, tenant in ((1, "anna"), (2, "anna"), (2, "bob"))
        )
        run(batch, [first])
        run(batch, [second, other])
        assert (first.reused, second.reused, other.reused) == (0, 4 * PAGE, 0)
        for sequence, last in ((first, 1), (second, 2), (other, 2)):
            assert sequence.new_tokens == alone(decoder, [*prompt, last], {"max_new_tokens": 8}, 0)

    def test_an_answer_is_known_too(self, decoder, batch_of):
        prompt, batch = [3] * 5, batch_of(decoder, 4096, sequences=2)
        first = sequence_of(decoder, prompt, {"max_new_tokens": 3 * PAGE}, GraphConfig(), 0)
        run(batch, [first])
        longer = [*first.text, 4]
        second = sequence_of(decoder, longer, {"max_new_tokens": 4}, GraphConfig(), 0)
        run(batch, [second])
        assert second.reused >= 2 * PAGE
        assert second.new_tokens == alone(decoder, longer, {"max_new_tokens": 4}, 0)

    @SHAPES
    def test_pages_that_others_read_are_not_written_into(self, decoder, captured):
        engine = PagedEngine(decoder.target_model, 1024, captured)
        context, tokens = engine.open(), [number % VOCAB for number in range(2 * PAGE)]
        with torch.no_grad():
            context.prefill(tokens)
            context.publish()
            pool = list(engine.cache.blocks.values())
            kept = [states.clone() for states in pool]
            places = [page * PAGE + slot for page in context.pages for slot in range(PAGE)]
            context.rewind(PAGE + 3)
            assert len(context.text) == PAGE
            context.prefill([5] * PAGE)
        for states, before in zip(pool, kept, strict=True):
            assert torch.equal(states[:, :, places], before[:, :, places])


class TestFaults:
    def test_a_sequence_that_fails_fails_alone(self, decoder, batch_of):
        class Broken(LogitsProcessor):
            def __call__(self, ids, scores):
                if ids.shape[1] > 8:
                    raise ValueError("broken on purpose")
                return scores

        arguments = {"max_new_tokens": 12}
        good = [sequence_of(decoder, [1, 2, 3], arguments, GraphConfig(), seed) for seed in range(3)]
        bad = sequence_of(
            decoder, [1, 2, 3], arguments | {"logits_processor": LogitsProcessorList([Broken()])}, GraphConfig(), 0
        )
        batch = batch_of(decoder, 4096, sequences=4)
        for sequence in (good[0], bad, *good[1:]):
            batch.add(sequence)
        while batch.busy:
            batch.step()
        assert str(bad.failure) == "broken on purpose"
        for sequence in good:
            assert sequence.failure is None
            assert sequence.new_tokens == alone(decoder, [1, 2, 3], arguments, 0)
        check_left_behind(batch)

    @pytest.mark.parametrize("mode", ["off", "auto", "graph"])
    def test_memory_short_for_one_sequence_costs_no_other_a_token(self, decoder, batch_of, mode):
        """It runs out while the sequences of a step are walked: some have taken theirs, and the first has finished."""

        class Short(LogitsProcessor):
            def __call__(self, ids, scores):
                if ids.shape[1] > 8:
                    raise torch.OutOfMemoryError("planted")
                return scores

        config = GraphConfig(mode=mode, cost="flat")
        lengths = [6, 20, 20, 6, 12]  # without a draft the fourth and the failure come in the sixth step
        jobs = [([1, 2, seed], {"max_new_tokens": most}, config, seed) for seed, most in enumerate(lengths)]
        jobs[2][1]["logits_processor"] = LogitsProcessorList([Short()])
        sequences = [sequence_of(decoder, *job) for job in jobs]
        batch, told, ended = batch_of(decoder, 4096, sequences=5), {one: [] for one in sequences}, set()
        for sequence in sequences:
            batch.add(sequence)
        while batch.busy:
            for sequence, step in batch.step().steps:
                assert sequence not in ended, "nobody is stepped past its end"
                told[sequence] += step.tokens if step else []
                ended |= {sequence} if sequence.done else set()
        assert isinstance(sequences[2].failure, torch.OutOfMemoryError)
        for place in (0, 1, 3, 4):
            prompt, arguments, _, seed = jobs[place]
            assert sequences[place].failure is None
            assert told[sequences[place]] == sequences[place].new_tokens == alone(decoder, prompt, arguments, seed)
        expected = alone(decoder, [1, 2, 2], {"max_new_tokens": 20}, 2)
        assert told[sequences[2]] == expected[: len(told[sequences[2]])]
        check_left_behind(batch)

    @pytest.mark.parametrize("mode", ["off", "auto", "graph"])
    def test_out_of_memory_sheds_the_newest_alone(self, decoder, monkeypatch, batch_of, mode):
        batch, config = batch_of(decoder, 4096, sequences=4), GraphConfig(mode=mode, cost="flat")
        sequences = [sequence_of(decoder, [1, 2, seed], {"max_new_tokens": 12}, config, seed) for seed in range(4)]
        told = {sequence: [] for sequence in sequences}
        for sequence in sequences:
            batch.add(sequence)
        run_pass, passes, sizes = batch.engines.target.run, count(), []

        def run(segments):
            sizes.append(len(segments))
            if next(passes) >= 3 and len(segments) == 4:
                raise torch.OutOfMemoryError("planted")
            return run_pass(segments)

        monkeypatch.setattr(batch.engines.target, "run", run)
        for _ in range(500):
            for sequence, step in batch.step().steps:
                told[sequence] += step.tokens if step else []
        assert not batch.busy
        assert isinstance(sequences[3].failure, torch.OutOfMemoryError)
        assert sizes[:4] == [4, 4, 4, 4] and 4 not in sizes[sizes.index(3) :], (
            "it is taken again by those that are left"
        )
        for seed, sequence in enumerate(sequences):
            expected = alone(decoder, [1, 2, seed], {"max_new_tokens": 12}, seed)
            assert told[sequence] == sequence.new_tokens == expected[: len(told[sequence])]
            assert sequence.failure is not None or told[sequence] == expected
        check_left_behind(batch)

    def test_a_sequence_too_long_for_the_pool_is_refused(self, decoder, batch_of):
        batch = batch_of(decoder, 64, sequences=2)
        sequence = sequence_of(decoder, [1] * 50, {"max_new_tokens": 100}, GraphConfig(cost="flat"), 0)
        assert batch.longest(nodes=14) == 50
        batch.add(sequence)
        run_to_the_end(batch)
        assert "pages are needed" in str(sequence.failure)
        check_left_behind(batch)


def run_to_the_end(batch):
    for _ in range(500):
        if not batch.busy:
            return
        batch.step()
    raise AssertionError("it never ends")


@SHAPES
def test_segments_of_one_pass_do_not_see_each_other(target, captured):
    """The logits of a sequence's nodes are the same, bit by bit or nearly, whoever is in the pass."""
    engine = PagedEngine(target, 2048, captured)
    with torch.no_grad():
        contexts = [engine.open() for _ in range(3)]
        for number, context in enumerate(contexts):
            context.prefill([number + 1] * (10 * number + 5))
        segment = Segment.of_text(contexts[1], [4, 5, 6], scored=True)
        by_itself = engine.run([segment])[0].logits.clone()
        contexts[1].forget(0)
        others = [Segment.of_text(context, [7, 8], scored=True) for context in (contexts[0], contexts[2])]
        among = engine.run([others[0], segment, others[1]])[1].logits
    torch.testing.assert_close(by_itself, among, rtol=1e-12, atol=1e-12)
