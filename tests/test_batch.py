"""Many texts together: each gets the tokens that it would get alone, whatever shares its batch."""

import random
from itertools import count

import pytest
import torch
import transformers
from families import FAMILIES, MORE_FAMILIES, SMALL, VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch, Text
from draftgraph.batching.seats import Apart, packed_or_apart
from draftgraph.batching.sharing import Experience
from draftgraph.engine.packed import PackedEngine, Part
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.engine.pages import PAGE
from draftgraph.generation import prepare
from draftgraph.tuning.latency import Curve, Latencies, MeasuredCost

MODES = ("auto", "graph", "tree", "chain", "off")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def target():
    return target_of("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def decoder(target):
    return GraphDecoder(target, perturbed(target))


@pytest.fixture(params=["eager", "static"])
def batch_of(request, monkeypatch):
    """Makes batches, with passes as they are or as they would be captured on a GPU."""

    def made(decoder, slots, texts):
        with monkeypatch.context() as patch:
            patch.setenv("DRAFTGRAPH_ENGINE", request.param)
            return Batch(decoder, slots, texts)

    return made


ENGINES = pytest.mark.parametrize("kind", [PackedEngine, PackedStaticEngine])


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


def text_of(decoder, prompt, arguments, config, seed, **more):
    ids = torch.tensor([prompt], device=decoder.target_engine.device)
    request = prepare(decoder.target_model, ids, None, **arguments)
    return Text(request, seed, config, **more)


def run(batch, texts=()):
    for text in texts:
        batch.add(text)
    while batch.busy:
        for text, _ in batch.step():
            if text.failure is not None:
                raise text.failure


def check_left_behind(batch):
    assert not batch.running and not batch.waiting
    assert [engine.used for engine in batch.engines] == [0] * len(batch.engines)


def test_memory_that_is_short_when_the_draft_catches_up_costs_nobody_a_token(decoder, monkeypatch):
    jobs = [([1, 5, 9, number], {"max_new_tokens": 40}, GraphConfig(mode="graph"), number) for number in range(4)]
    texts = [text_of(decoder, *job) for job in jobs]
    batch, sound, raised, failed = Batch(decoder, 4096, 4), Batch._read_draft, [], []

    def short(self, texts, late=0):
        if late and not raised and any(text.going.new_tokens for text in texts):
            raised.append(late)
            raise torch.OutOfMemoryError
        return sound(self, texts, late)

    monkeypatch.setattr(Batch, "_read_draft", short)
    told = {id(text): [] for text in texts}
    for text in texts:
        batch.add(text)
    while batch.busy:
        for text, step in batch.step():
            told[id(text)] += step.tokens if step else []
            failed += [text] if text.failure else []
    assert failed == texts[-1:] and isinstance(texts[-1].failure, torch.OutOfMemoryError)
    for text, (prompt, arguments, _, seed) in zip(texts[:-1], jobs, strict=False):
        assert told[id(text)] == text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize("slots", [16384, 512])  # plenty, and so few that not everybody can be read by the draft
def test_who_drafts_only_later_is_read_by_the_draft_then(decoder, batch_of, slots):
    curves = (Curve.of([0], [1, 64], [[seconds, seconds]]) for seconds in (1e-2, 1e-5))
    free = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    jobs = [(prompt, arguments, free, seed) for prompt, arguments, _, seed in asked(12, seed=4)]
    texts = [text_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, slots, 12)
    batch.experience = Experience()
    customs = [batch.experience.custom(2**size) for size in range(5)]
    for text in texts:
        batch.add(text)
    for step in count():
        for custom in customs:
            custom.drafts = step % 30 > 25
        if not batch.busy:
            break
        batch.step()
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)
    if slots > 512:
        assert sum(text.going.stats.accepted_by_source["draft"] for text in texts) > 5


@pytest.mark.parametrize("slots", [16384, 512])  # plenty, and so few that texts have to make room for others
def test_everybody_gets_what_he_would_get_alone(decoder, slots, batch_of):
    jobs = asked(30)
    texts = [text_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, slots, texts=8)
    run(batch, texts)
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


def test_texts_join_and_leave_at_any_step(decoder, batch_of):
    jobs, draw = asked(40, seed=1), random.Random(2)
    texts = [text_of(decoder, *job) for job in jobs]
    batch, coming, gone = batch_of(decoder, 2048, texts=6), list(texts), []
    while coming or batch.busy:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if coming:
                batch.add(coming.pop())
        if draw.random() < 0.1 and (present := [*batch.running, *batch.waiting]):
            gone.append(draw.choice(present))
            batch.remove(gone[-1])
        batch.step()
    assert gone
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        if text not in gone:
            assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES))
def test_every_family_in_a_batch(family, batch_of):
    target = target_of(family)
    decoder = GraphDecoder(target, perturbed(target))
    jobs = asked(5, seed=3, longest=40)
    texts = [text_of(decoder, *job) for job in jobs]
    batch = batch_of(decoder, 4096, texts=3)
    run(batch, texts)
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"]
)
@ENGINES
def test_common_families_are_packed(family, kind, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static" if kind is PackedStaticEngine else "eager")
    assert type(packed_or_apart(target_of(family), 1024, 2)) is kind


def test_what_cannot_be_packed_is_said_once_and_works(capsys):
    engine = packed_or_apart(target_of("falcon"), 1024, 2)
    assert isinstance(engine, Apart)
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
    texts = [text_of(decoder, prompt, {"max_new_tokens": 24}, GraphConfig(cost="flat"), 0) for prompt in prompts]
    run(batch_of(decoder, 4096, texts=2), texts)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, {"max_new_tokens": 24}, 0)


def test_a_planted_leak_between_texts_is_found(monkeypatch, target):
    from draftgraph.engine import packed_attention

    def leaking(part, states):
        return states[:, :, : part.end]

    monkeypatch.setattr(packed_attention.TextPart, "of", leaking)
    assert isinstance(packed_or_apart(target, 1024, 2), Apart)


def test_a_pass_over_many_texts_is_one_pass(decoder, batch_of):
    batch, passes = batch_of(decoder, 4096, texts=8), []
    hook = decoder.target_model.register_forward_pre_hook(lambda *_: passes.append(1))
    plain = GraphConfig(mode="off")
    run(batch, [text_of(decoder, [1, 2, 3], {"max_new_tokens": 5}, plain, seed) for seed in range(8)])
    hook.remove()
    assert len(passes) == 6  # the prompts, and a pass for every token


def test_drafts_of_many_texts_share_their_passes(decoder, monkeypatch, batch_of):
    batch = batch_of(decoder, 4096, texts=4)
    parts = []
    draft_run = batch.draft.run
    monkeypatch.setattr(batch.draft, "run", lambda given: parts.append(len(given)) or draft_run(given))
    chain = GraphConfig(mode="chain", chain_length=3)
    run(batch, [text_of(decoder, [1, 2, 3], {"max_new_tokens": 12}, chain, 0) for _ in range(4)])
    assert parts[0] == 4 and set(parts) == {4}


class TestPrefixes:
    def test_a_beginning_is_read_once(self, decoder, batch_of):
        prompt = [number % VOCAB for number in range(4 * PAGE)]
        batch = batch_of(decoder, 4096, texts=2)
        first, second, other = (
            text_of(decoder, [*prompt, last], {"max_new_tokens": 8}, GraphConfig(), 0, tenant=tenant)
            for last, tenant in ((1, "anna"), (2, "anna"), (2, "bob"))
        )
        run(batch, [first])
        run(batch, [second, other])
        assert (first.reused, second.reused, other.reused) == (0, 4 * PAGE, 0)
        for text, last in ((first, 1), (second, 2), (other, 2)):
            assert text.going.new_tokens == alone(decoder, [*prompt, last], {"max_new_tokens": 8}, 0)

    def test_an_answer_is_known_too(self, decoder, batch_of):
        prompt, batch = [3] * 5, batch_of(decoder, 4096, texts=2)
        first = text_of(decoder, prompt, {"max_new_tokens": 3 * PAGE}, GraphConfig(), 0)
        run(batch, [first])
        longer = [*first.going.text, 4]
        second = text_of(decoder, longer, {"max_new_tokens": 4}, GraphConfig(), 0)
        run(batch, [second])
        assert second.reused >= 2 * PAGE
        assert second.going.new_tokens == alone(decoder, longer, {"max_new_tokens": 4}, 0)

    @ENGINES
    def test_pages_that_others_read_are_not_written_into(self, decoder, kind):
        engine = kind(decoder.target_model, 1024)
        seat, tokens = engine.open(), [number % VOCAB for number in range(2 * PAGE)]
        with torch.no_grad():
            seat.prefill(tokens)
            seat.settle()
            pool = engine.cache.states if kind is PackedEngine else list(engine.cache.blocks.values())
            kept = [states.clone() for states in pool]
            places = [page * PAGE + slot for page in seat.pages for slot in range(PAGE)]
            seat.rewind(PAGE + 3)
            assert len(seat.text) == PAGE
            seat.prefill([5] * PAGE)
        for states, before in zip(pool, kept, strict=True):
            assert torch.equal(states[:, :, places], before[:, :, places])


class TestFaults:
    def test_a_text_that_fails_fails_alone(self, decoder, batch_of):
        from transformers import LogitsProcessor, LogitsProcessorList

        class Broken(LogitsProcessor):
            def __call__(self, ids, scores):
                if ids.shape[1] > 8:
                    raise ValueError("broken on purpose")
                return scores

        arguments = {"max_new_tokens": 12}
        good = [text_of(decoder, [1, 2, 3], arguments, GraphConfig(), seed) for seed in range(3)]
        bad = text_of(
            decoder, [1, 2, 3], arguments | {"logits_processor": LogitsProcessorList([Broken()])}, GraphConfig(), 0
        )
        batch = batch_of(decoder, 4096, texts=4)
        for text in (good[0], bad, *good[1:]):
            batch.add(text)
        while batch.busy:
            batch.step()
        assert str(bad.failure) == "broken on purpose"
        for text in good:
            assert text.failure is None
            assert text.going.new_tokens == alone(decoder, [1, 2, 3], arguments, 0)
        check_left_behind(batch)

    def test_out_of_memory_sheds_the_newest_alone(self, decoder, monkeypatch, batch_of):
        batch = batch_of(decoder, 4096, texts=4)
        texts = [
            text_of(decoder, [1, 2, seed], {"max_new_tokens": 12}, GraphConfig(cost="flat"), seed) for seed in range(4)
        ]
        for text in texts:
            batch.add(text)
        for _ in range(2):
            batch.step()
        run_pass, failures = batch.target.run, iter([True])
        monkeypatch.setattr(batch.target, "run", lambda parts: fail(failures) or run_pass(parts))
        run_to_the_end(batch)
        assert isinstance(texts[3].failure, torch.OutOfMemoryError)
        for seed, text in enumerate(texts[:3]):
            assert text.going.new_tokens == alone(decoder, [1, 2, seed], {"max_new_tokens": 12}, seed)
        check_left_behind(batch)

    def test_a_text_too_long_for_the_pool_is_refused(self, decoder, batch_of):
        batch = batch_of(decoder, 64, texts=2)
        text = text_of(decoder, [1] * 50, {"max_new_tokens": 100}, GraphConfig(cost="flat"), 0)
        assert not batch.could_hold(150)
        batch.add(text)
        run_to_the_end(batch)
        assert "pages are needed" in str(text.failure)
        check_left_behind(batch)


def fail(failures):
    if next(failures, False):
        raise torch.OutOfMemoryError("planted")


def run_to_the_end(batch):
    for _ in range(500):
        if not batch.busy:
            return
        batch.step()
    raise AssertionError("it never ends")


@ENGINES
def test_parts_of_one_pass_do_not_see_each_other(target, kind):
    """The logits of a text's nodes are the same, bit by bit or nearly, whoever is in the pass."""
    engine = kind(target, 2048)
    with torch.no_grad():
        seats = [engine.open() for _ in range(3)]
        for number, seat in enumerate(seats):
            seat.prefill([number + 1] * (10 * number + 5))
        part = Part.of_text(seats[1], [4, 5, 6], scored=True)
        by_itself = engine.run([part])[0].clone()
        seats[1].forget(0)
        others = [Part.of_text(seat, [7, 8], scored=True) for seat in (seats[0], seats[2])]
        among = engine.run([others[0], part, others[1]])[1]
    torch.testing.assert_close(by_itself, among, rtol=1e-12, atol=1e-12)
