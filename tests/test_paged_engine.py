"""The paged engine: passes over one or many sequences, of fixed shapes or as wide as their nodes, against plain passes.

On a CPU nothing is captured, but passes of fixed shapes are all the same otherwise.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import ALONE, PAGED, ancestry, plain, plain_story, scattered_context, score, story, tokens_of
from families import VOCAB, perturbed, target_of
from test_batch import alone, asked, check_left_behind, run, sequence_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.cost.budget import FlatCost
from draftgraph.engine import paged, passes, selfcheck
from draftgraph.engine.attention import NAME
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.cache import PagedCache
from draftgraph.engine.capture import Captured
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import NODES, SEQUENCES, PagedContext, PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.passes import PassData, PassShape, Piece, lay_out
from draftgraph.engine.program import Program
from draftgraph.engine.protocol import PassResult, Ranking, Sampling, Segment, Warping
from draftgraph.engine.selfcheck import engine_for
from draftgraph.errors import DraftGraphError
from draftgraph.graph import WORD
from draftgraph.kernels import attention
from draftgraph.kernels.fused import MOVED_TOGETHER
from draftgraph.kernels.sampling import MOST_KEPT, sample_reference
from draftgraph.models import load_model
from draftgraph.noise import CHOICE, KeyedNoise, signed

BOTH = pytest.mark.parametrize("captured", [False, True], ids=["exact", "captured"])


@pytest.fixture(scope="module")
def model() -> Any:
    return target_of("llama", dtype=torch.float64)


def exact(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def follows(context: PagedContext, model: Any, text: list[int]) -> None:
    """A token behind its text is scored as behind this one."""
    exact(score(context, [7], *ALONE), plain(model, [*text, 7])[-1:])
    context.forget(0)


@BOTH
@pytest.mark.parametrize("name", [*PAGED, "gpt_oss"])
def test_says_what_plain_passes_say(name: str, captured: bool) -> None:
    model = target_of(name)
    expected, before = plain_story(model), model.config._attn_implementation
    for context in (scattered_context(model, captured=captured), PagedEngine(model, captured=captured).open()):
        for one, other in zip(story(context, model), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert model.config._attn_implementation == before != NAME


@BOTH
@torch.no_grad()
def test_a_tree_may_be_wider_than_a_pass_and_than_the_pool(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "SMALLEST", 16)
    model, count = target_of("mistral"), NODES[-1] + 9
    parents = np.concatenate([[-1], np.random.default_rng(4).integers(0, 40, 40), np.arange(40, count - 1)])
    depths, visible = ancestry(np.minimum(parents, np.arange(-1, count - 1)))
    engine, scored = PagedEngine(model, captured=captured), []
    engine.widest = NODES[-1]
    for context in (engine.open(), EagerEngine(model).open()):
        with Loan(model):
            context.prefill(tokens_of(13).tolist())
            scored.append(score(context, tokens_of(count, 1), depths, visible))
    torch.testing.assert_close(*scored, rtol=1e-4, atol=1e-5)


@BOTH
@torch.no_grad()
def test_a_scattered_tree_may_be_wider_than_a_pass(model: Any, captured: bool) -> None:
    context, tokens = scattered_context(model, captured=captured), tokens_of(600, 1)
    context.engine.widest = NODES[-1]
    context.prefill([1, 2, 3])
    depths, visible = ancestry(np.minimum(np.random.default_rng(4).integers(0, 600, 600), np.arange(-1, 599)))
    logits = score(context, tokens, depths, visible)
    for node in range(0, 600, 37):
        exact(logits[node], plain(model, [1, 2, 3, *tokens[np.flatnonzero(visible[node])].tolist()])[-1])


class TestGrowth:
    @BOTH
    @torch.no_grad()
    def test_a_pool_that_grows_keeps_the_texts_of_all_its_contexts(
        self, model: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And scratch nodes, accepted nodes that are not in their places yet, and pages that are kept for their
        tokens."""
        monkeypatch.setattr(paged, "SMALLEST", 256)
        engine, (depths, visible) = PagedEngine(model, captured=captured), ancestry(np.array([-1, 0, 0, 2, 2]))
        left, prefix = engine.open(), tokens_of(2 * PAGE, 9).tolist()
        left.prefill(prefix)
        left.close()
        contexts = [engine.open() for _ in range(3)]
        for number, context in enumerate(contexts):
            context.prefill(tokens_of(20 + 9 * number, number).tolist())
        tokens = tokens_of(5, 5)
        before = [score(context, tokens, depths, visible) for context in contexts]
        contexts[0].commit([0, 2, 4], tokens[[0, 2, 4]].tolist())
        contexts[1].forget(3)
        grown = engine.pool_moves
        contexts[2].reserve(300)
        assert engine.slots == 512 and engine.pool_moves == grown + 1
        follows(contexts[0], model, [*tokens_of(20).tolist(), *tokens[[0, 2, 4]].tolist()])
        exact(score(contexts[1], tokens[3:], depths[3:], visible[3:]), before[1][3:])
        contexts[2].forget(0)
        exact(score(contexts[2], tokens, depths, visible), before[2])
        contexts[2].forget(0)
        contexts[2].prefill(more := tokens_of(200, 6).tolist())
        follows(contexts[2], model, [*tokens_of(38, 2).tolist(), *more])
        again = engine.open()
        assert again.begin_with([*prefix, 1], 2) == len(prefix)
        follows(again, model, prefix)

    @BOTH
    @torch.no_grad()
    def test_pages_that_nobody_holds_are_kept_for_their_tokens_when_the_pool_grows(
        self, model: Any, captured: bool
    ) -> None:
        engine, prefix = PagedEngine(model, captured=captured), tokens_of(3 * PAGE).tolist()
        first = engine.open()
        first.prefill(prefix)
        first.close()
        assert engine.used == 0
        engine.reserve(4 * engine.slots)
        second = engine.open()
        assert second.begin_with(prefix, 1) == len(prefix)
        follows(second, model, prefix)

    @BOTH
    def test_a_text_that_does_not_fit_is_refused_and_the_next_is_right(
        self, captured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if captured:
            monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
        decoder = GraphDecoder(target_of("llama"), config=GraphConfig(mode="off"))
        given: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 20}
        expected = decoder.generate(**given).sequences.tolist()

        def small(like: Any, capacity: int, dtype: Any) -> Any:
            if capacity > 1024 + PAGE:
                raise torch.OutOfMemoryError
            return PagedCache(like, capacity, dtype)

        monkeypatch.setattr(paged, "PagedCache", small)
        with pytest.raises(DraftGraphError, match="no memory for the keys and values of 2048 tokens"):
            decoder.generate([tokens_of(9).tolist()], max_new_tokens=1200)
        assert decoder.generate(**given).sequences.tolist() == expected

    @torch.no_grad()
    def test_a_text_may_outgrow_the_tables(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paged, "FIRST_TABLE", 2)
        context, text = scattered_context(model, captured=True), tokens_of(300).tolist()
        for start in range(0, 300, 30):
            context.prefill(text[start : start + 30])
            follows(context, model, text[: start + 30])
        assert context.engine.most_pages == 32


class TestOtherWeights:
    @BOTH
    @torch.no_grad()
    def test_are_noticed_by_every_context(self, captured: bool) -> None:
        model = target_of("llama")
        engine = PagedEngine(model, captured=captured)
        contexts = [engine.open() for _ in range(2)]
        for context in contexts:
            context.prefill([1, 2, 3])
            score(context, tokens_of(1), *ALONE)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        contexts[0].begin(5, reuse=True)
        assert not contexts[0].text and not engine._passes
        contexts[1].begin(5, reuse=True)
        assert not contexts[1].text
        contexts[1].prefill([1, 2])
        contexts[1].begin(5, reuse=True)
        assert contexts[1].text == [1, 2]

    @BOTH
    @torch.no_grad()
    def test_leave_nothing_to_begin_with(self, captured: bool) -> None:
        model, prefix = target_of("llama"), tokens_of(2 * PAGE).tolist()
        engine = PagedEngine(model, 1024, captured)
        first = engine.open()
        first.prefill(prefix)
        first.close()
        embedding = model.get_input_embeddings()
        embedding.weight = torch.nn.Parameter(embedding.weight.detach().flip(0).contiguous())
        second = engine.open()
        second.begin(40, reuse=False)
        assert second.begin_with(prefix, 1) == 0
        second.close()
        assert engine.pages.empty


class Watched(PagedEngine):
    """Notes the shapes of its passes."""

    def __init__(self, model: Any, slots: int, captured: bool = True) -> None:
        super().__init__(model, slots, captured)
        self.shapes: list[PassShape] = []

    def _launch(self, recorded: Any, pieces: list[Piece]) -> list[PassResult]:
        self.shapes.append(recorded.data.shape)
        return super()._launch(recorded, pieces)


class TestShapes:
    @BOTH
    @torch.no_grad()
    def test_captured_passes_are_of_few_shapes(self, model: Any, captured: bool) -> None:
        engine, draw = Watched(model, 8192, captured), random.Random(0)
        contexts = [engine.open() for _ in range(20)]
        for _ in range(25):
            here = draw.sample(contexts, draw.choice([1, 2, 5, 17]))
            segments = [
                Segment.of_text(context, tokens_of(draw.choice([1, 3, 20]), draw.randrange(9)).tolist(), True)
                for context in here
            ]
            for segment, result in zip(segments, engine.run(segments), strict=True):
                text = [*segment.context.text, *segment.tokens.tolist()]
                exact(result.logits, plain(model, text)[-len(segment.tokens) :])
                segment.commit()
        assert all(shape.words == 1 for shape in engine.shapes)
        if captured:
            assert len(engine._passes) == len(set(engine.shapes)) < 15
            assert all(shape.nodes in NODES and shape.sequences in SEQUENCES for shape in engine.shapes)
        else:
            assert len(engine._passes) <= paged.SHAPES
            assert all(kept.run.output is None for kept in engine._passes.values()), "logits are not kept"

    @torch.no_grad()
    def test_long_prompts_are_read_in_several_passes(self, model: Any) -> None:
        engine = Watched(model, 8192)
        reading, stepping = engine.open(), engine.open()
        stepping.prefill([1, 2, 3])
        prompt, engine.shapes = tokens_of(1100).tolist(), []
        segments = [Segment.of_text(stepping, [4, 5], scored=True), Segment.of_text(reading, prompt)]
        step, nothing = engine.run(segments)
        assert nothing.logits.shape == (0, VOCAB) and reading.scratch == 1100
        assert [(shape.nodes, shape.sequences, shape.words, shape.scored) for shape in engine.shapes] == [
            (512, 4, 8, 64),
            (512, 4, 8, 64),
            (128, 4, 8, 64),
        ]
        exact(step.logits, plain(model, [1, 2, 3, 4, 5])[-2:])
        assert step.ranking.tokens.tolist() == Ranking.of(step.logits).tokens.tolist()
        segments[1].commit()
        follows(reading, model, prompt)

    @torch.no_grad()
    def test_a_pass_that_is_not_captured_takes_a_prompt_and_steps_at_once(self, model: Any) -> None:
        engine = Watched(model, 8192, captured=False)
        reading, stepping = engine.open(), engine.open()
        prompt = tokens_of(1100).tolist()
        step, nothing = engine.run([Segment.of_text(stepping, [4, 5], scored=True), Segment.of_text(reading, prompt)])
        assert [(shape.nodes, shape.sequences, shape.scored) for shape in engine.shapes] == [(1102, 2, 2)]
        assert nothing.logits.shape == (0, VOCAB)
        exact(step.logits, plain(model, [4, 5]))

    @torch.no_grad()
    def test_what_steps_and_prompts_need_can_be_recorded_before(self, model: Any) -> None:
        engine = Watched(model, 8192)
        engine.prepare(5)
        recorded = set(engine._passes)
        assert {shape.sequences for shape in recorded} == {1, 4, 16}
        assert {shape.nodes for shape in recorded} == set(NODES)
        contexts, engine.shapes = [engine.open() for _ in range(5)], []
        for length in (1, 3, 40):
            engine.run([Segment.of_text(context, tokens_of(length).tolist(), True) for context in contexts])
            for context in contexts:
                context.forget(0)
        for length in (2, 70, 256, 600):
            prompt = Segment.of_text(contexts[0], tokens_of(length).tolist())
            for beside in (1, 30):
                steps = (Segment.of_text(context, tokens_of(beside).tolist(), True) for context in contexts[1:])
                engine.run([prompt, *steps])
                for context in contexts:
                    context.forget(0)
        assert set(engine._passes) == recorded == set(engine.shapes) | recorded
        reader = Watched(model, 8192)
        reader.prepare(5, reading_only=True)
        recorded = set(reader._passes)
        for length in (1, 100, 300):
            reader.run([Segment.of_text(reader.open(), tokens_of(length).tolist()) for _ in range(3)])
        assert set(reader._passes) == recorded and len(recorded) < len(engine._passes) // 2

    @torch.no_grad()
    def test_those_that_nobody_needs_any_more_go(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paged, "SHAPES", 2)
        context = scattered_context(model, captured=True)
        for nodes in (1, 9, 8, 17, 5, 16):
            found = context.engine.run([Segment.of_text(context, tokens_of(nodes).tolist(), True)])[0]
            exact(found.logits, plain(model, tokens_of(nodes).tolist()))
            context.forget(0)
        assert [shape.nodes for shape in context.engine._passes] == [8, 16]

    @BOTH
    @torch.no_grad()
    def test_more_nodes_and_sequences_than_a_pass_holds(
        self, model: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(paged, "SEQUENCES", (1, 4))
        engine = Watched(model, 8192, captured)
        engine.widest = 32
        depths, visible = ancestry(np.minimum(np.random.default_rng(4).integers(0, 40, 80), np.arange(-1, 79)))
        tokens, contexts = tokens_of(80, 1), [engine.open() for _ in range(6)]
        for number, context in enumerate(contexts):
            context.prefill([number + 1] * (3 + number))
        segments = [
            Segment(context, tokens[:count], depths[:count], visible[:count, :count])
            for context, count in zip(contexts, (3, 80, 9, 1, 1, 20), strict=True)
        ]
        engine.shapes = []
        for segment, result in zip(segments, engine.run(segments), strict=True):
            assert len(result.logits) == len(segment.tokens)
            for node in range(len(result.logits)):
                path = tokens[np.flatnonzero(visible[node])].tolist()
                exact(result.logits[node], plain(model, [*segment.context.text, *path])[-1])
            assert result.ranking.tokens.tolist() == Ranking.of(result.logits).tokens.tolist()
        assert len(engine.shapes) > 3
        assert {shape.nodes for shape in engine.shapes} <= {8, 16, 32} or not captured

    def test_data_lies_where_it_is_told(self) -> None:
        """All parts of the one buffer, of three dtypes, and none over another."""
        data = PassData(PassShape(8, 4, 2, 8), 5, 640, torch.device("cpu"))
        for number, part in enumerate(data.host.values()):
            part[...] = number
        data.arrive()
        for number, part in enumerate(data.host.values()):
            assert (part == number).all()
        assert data.paged.pages.shape == (4, 5) and data.paged.pages.dtype == torch.int32
        assert (data.paged.pages == list(data.host).index("pages")).all()
        assert data.sampling[1].dtype == torch.float64 and data.paged.scratch_positions.shape[1] == 2 * WORD


class TestMoves:
    def test_those_of_a_sequence_stay_together(self) -> None:
        moves = [
            (np.arange(count) + 100 * number, np.arange(count)) for number, count in enumerate((9, 9, 7, 3, 16, 2))
        ]
        sources, targets = np.full((2, 3 * MOVED_TOGETHER), 5)
        left = lay_out(moves, sources, targets)
        assert len(left) == 1 and len(left[0][0]) == 16
        for number, (count, first) in enumerate(zip((9, 9, 7), (0, 16, 25), strict=True)):
            assert sources[first : first + count].tolist() == (np.arange(count) + 100 * number).tolist()
        assert sources[32:38].tolist() == [300, 301, 302, 500, 501, 5]
        assert (sources == targets)[9:16].all()

    @BOTH
    @pytest.mark.parametrize("depth", [3, 40])  # in the next pass; and a path too long for that
    @torch.no_grad()
    def test_accepted_nodes_go_to_their_places(self, model: Any, depth: int, captured: bool) -> None:
        engine = PagedEngine(model, 8192, captured)
        contexts, chain = [engine.open() for _ in range(5)], np.arange(depth)
        parents = np.concatenate([[-1], np.repeat(chain, 2)])  # every other node goes on
        parents[1:] = np.where(parents[1:] > 0, 2 * parents[1:], 0)
        depths, visible = ancestry(parents)
        path = [0, *(2 * (chain + 1)).tolist()]
        texts = []
        for number, context in enumerate(contexts):
            context.prefill(tokens_of(11 + number, number).tolist())
            tokens = tokens_of(len(parents), 9 + number)
            score(context, tokens, depths, visible)
            context.commit(path, tokens[path].tolist())
            texts.append(context.text)
        waiting = 1 if captured and depth <= MOVED_TOGETHER else 0  # every pass took those of the one before
        assert len(engine._moves) == waiting
        engine.run([Segment(context, np.array([1]), *ALONE) for context in contexts])
        assert not engine._moves
        for context, text in zip(contexts, texts, strict=True):
            context.forget(0)
            follows(context, model, text)

    @torch.no_grad()
    def test_more_than_a_pass_takes_are_made_before_it(self, model: Any) -> None:
        engine, (depths, visible) = PagedEngine(model, 8192, True), ancestry(np.array([-1, 0, 0, 2, 2]))
        contexts = [engine.open() for _ in range(9)]
        tokens = tokens_of(5)
        engine.run([Segment(context, tokens, depths, visible) for context in contexts])
        for context in contexts:
            context.commit([0, 2, 4], tokens[[0, 2, 4]].tolist())
        assert len(engine._moves) == 9
        for context in contexts:  # in a pass for one sequence
            follows(context, model, context.text)


WARPINGS = [Warping(0.7, 5, 0.9), None, Warping(1.3), Warping(0.9, 0, 0.8, 0.05), Warping(1.0, 65), Warping(0.8, 64)]


def sampling_of(seed: int, warping: Warping | None) -> Sampling | None:
    return None if warping is None else Sampling(KeyedNoise(seed).stream_key(CHOICE), warping)


class TestSampling:
    @torch.no_grad()
    def test_tokens_of_all_sequences_are_sampled_in_one_go(self) -> None:
        model = target_of("llama")
        engine = PagedEngine(model, 4096, True)
        samplings = [sampling_of(seed, warping) for seed, warping in enumerate(WARPINGS)]
        for _ in range(3):
            segments = []
            for number, sampling in enumerate(samplings):
                context = engine.open()
                context.prefill([number] * (number + 2))
                tree = np.arange(3), np.tri(3, dtype=bool)
                segments.append(Segment(context, tokens_of(3, number), *tree, sampling=sampling))
            for segment, result, sampling in zip(segments, engine.run(segments), samplings, strict=True):
                if sampling is None or sampling.warping.top_k > MOST_KEPT:
                    assert result.sampled is None  # left to the host
                    continue
                warping = sampling.warping
                told = [
                    torch.tensor([number], dtype=torch.float64)
                    for number in (warping.temperature, warping.top_p, warping.min_p)
                ]
                positions = torch.from_numpy(len(segment.context.text) + segment.depths + 1)
                key = torch.tensor([signed(sampling.key)])
                expected = sample_reference(result.logits, key, positions, *told, warping.top_k)
                assert result.sampled == expected.tolist()
            samplings.reverse()

    @torch.no_grad()
    def test_however_many_top_k_are_asked_for_few_samplers_are_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One for each shape of a pass, and one for those without: top-k is data."""
        model, made = target_of("llama"), []

        class Counted(Captured):
            def __init__(self, *given: Any) -> None:
                made.append(self)
                super().__init__(*given)

        monkeypatch.setattr(paged, "Captured", Counted)
        engine = PagedEngine(model, 4096, True)
        context = engine.open()
        context.prefill([1, 2, 3])
        recorded = []
        for top_k in (*range(MOST_KEPT + 1), *range(MOST_KEPT + 1)):
            for nodes in (1, 5):
                sampling = sampling_of(top_k, Warping(0.9, top_k))
                segment = Segment(context, tokens_of(nodes), np.arange(nodes), np.tri(nodes, dtype=bool))
                segment.sampling = sampling
                assert len(engine.run([segment])[0].sampled or []) == nodes
                context.forget(0)
            recorded.append(len(made))
        assert recorded[1] == recorded[-1]
        assert all(len(one.samplers) <= 2 for one in engine._passes.values())

    @torch.no_grad()
    def test_passes_of_exact_shapes_leave_it_to_the_host(self, model: Any) -> None:
        context = PagedEngine(model, captured=False).open()
        segment = Segment(context, tokens_of(1), *ALONE, sampling=sampling_of(1, Warping()))
        assert context.engine.run([segment])[0].sampled is None

    def test_sampled_sequences_are_chosen_for_on_the_device(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = GraphDecoder(model, perturbed(model))
        jobs = asked(12, seed=5)
        sequences = [sequence_of(decoder, *job) for job in jobs]
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
        batch = Batch(decoder, 16384, sequences=8)
        assert all(isinstance(engine, PagedEngine) and engine.captured for engine in batch.engines.all)
        left_to_host: list[bool] = []
        run_pass = PagedEngine.run

        def watched(engine: PagedEngine, segments: list[Segment]) -> list[PassResult]:
            results = run_pass(engine, segments)
            pairs = zip(segments, results, strict=True)
            left_to_host.extend(result.sampled is None for segment, result in pairs if segment.sampling is not None)
            return results

        monkeypatch.setattr(PagedEngine, "run", watched)
        run(batch, sequences)
        assert left_to_host and not any(left_to_host)
        for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
            assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
        check_left_behind(batch)


def refuse(*_: Any) -> None:
    raise torch.OutOfMemoryError


class ShortOfMemory(Captured):
    """Records nothing that is wider than this."""

    most = 16

    def __init__(self, compute: Any, device: torch.device, *more: Any) -> None:
        super().__init__(compute, device, *more)
        found = self()
        if isinstance(found, tuple) and len(found[0]) > self.most:
            raise torch.OutOfMemoryError


class TestShortMemory:
    def test_without_memory_for_sampling_the_host_chooses(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decoder = GraphDecoder(model)
        jobs = asked(9, seed=5)
        sequences = [sequence_of(decoder, *job) for job in jobs]
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
        batch = Batch(decoder, 16384, sequences=8)
        monkeypatch.setattr(PagedEngine, "_sampler", refuse)
        run(batch, sequences)
        assert capsys.readouterr().err.count("no GPU memory for sampling") == 1
        for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
            assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)

    def test_passes_are_smaller(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decoder = GraphDecoder(model)
        jobs = asked(12, seed=6)
        sequences = [sequence_of(decoder, *job) for job in jobs]
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
        batch = Batch(decoder, 16384, sequences=12)
        monkeypatch.setattr(paged, "Captured", ShortOfMemory)
        run(batch, sequences)
        said = capsys.readouterr().err
        assert isinstance(batch.engines.target, PagedEngine) and batch.engines.target.widest == 16
        assert said.count("no GPU memory for passes of") == said.count("\n") > 0
        for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
            assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)

    def test_wide_trees_are_checked_in_parts(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        decoder, expected = captured_decoder(monkeypatch)
        monkeypatch.setattr(paged, "Captured", ShortOfMemory)
        monkeypatch.setattr(ShortOfMemory, "most", 4)
        found = decoder.generate(**ASKED, config=GraphConfig(cost=FlatCost()))
        said = capsys.readouterr().err
        assert found.sequences.tolist() == expected and found.stats.mean_accepted_length > 1.2
        assert isinstance(decoder.engines.target, PagedEngine) and decoder.engines.target.widest == 4
        assert said.count("no GPU memory for passes of") == said.count("\n")

    def test_without_memory_for_any_pass_sequences_fail_and_not_the_process(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoder = GraphDecoder(model)
        given = [1, 2, 3], {"max_new_tokens": 4}, GraphConfig(mode="off")
        sequences = [sequence_of(decoder, *given, seed) for seed in range(3)]
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
        batch = Batch(decoder, 4096, sequences=4)
        monkeypatch.setattr(paged, "Captured", ShortOfMemory)
        monkeypatch.setattr(ShortOfMemory, "most", 0)
        for sequence in sequences:
            batch.add(sequence)
        while batch.busy:
            batch.step()
        assert all("has no memory left for a pass" in str(sequence.failure) for sequence in sequences)
        check_left_behind(batch)


ASKED: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 40}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "seed": 5, "top_k": 0}


def captured_decoder(monkeypatch: pytest.MonkeyPatch) -> tuple[GraphDecoder, list[list[int]]]:
    """A pair on engines of fixed shapes, and what plain decoding says."""
    model = target_of("llama")
    expected = GraphDecoder(model).generate(**ASKED, config=GraphConfig(mode="off"))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    return GraphDecoder(model, perturbed(model, 0.1)), expected.sequences.tolist()


@pytest.mark.parametrize("style", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_promise_holds(name: str, style: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = target_of(name), ASKED | style
    expected = GraphDecoder(model).generate(**given, config=GraphConfig(mode="off"))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    assert all(isinstance(engine, PagedEngine) and engine.captured for engine in decoder.engines.all)
    for config in (GraphConfig(cost=FlatCost()), GraphConfig(mode="graph", tau=1), GraphConfig(mode="chain")):
        found = decoder.generate(**given, config=config)
        assert found.sequences.tolist() == expected.sequences.tolist(), config.mode
        assert found.stats.mean_accepted_length > 1.2, (config.mode, found.stats)


@pytest.mark.parametrize("least", [1, 8, 512])  # nodes of a pass in which text is read
def test_prompts_are_read_the_same_in_passes_of_any_width(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "LEAST_READ", least)
    decoder, expected = captured_decoder(monkeypatch)
    assert decoder.generate(**ASKED).sequences.tolist() == expected


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_that_break_cost_a_draft_its_acceptance_and_a_target_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    target, draft = target_of("llama").to(place), perturbed(target_of("llama"), 0.1).to(place)
    decoder = GraphDecoder(target, draft)
    expected = decoder.generate(**ASKED, config=GraphConfig(mode="off")).sequences.tolist()
    draft.lm_head.weight.data.fill_(torch.nan)
    for config in (GraphConfig(cost=FlatCost()), GraphConfig(mode="graph"), GraphConfig(mode="chain")):
        assert decoder.generate(**ASKED, config=config).sequences.tolist() == expected, config.mode
    target.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(DraftGraphError, match="logits are not finite"):
        decoder.generate(**ASKED)


def planted_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row, as they mostly lie."""
    in_a_row = property(lambda context: context.pages[0] + np.arange(len(context.pages), dtype=np.int32))
    monkeypatch.setattr(PagedContext, "table", in_a_row)


def planted_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is seen as ever, a tree as a chain."""
    visible = Piece.visible.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Piece, "visible", property(lambda piece: np.tri(*visible(piece).shape, piece.scratch - len(piece), dtype=bool))
    )


def planted_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sequence gets a node of the second."""
    fill = PassData.fill

    def shifted(data: PassData, pieces: list[Piece]) -> None:
        fill(data, pieces)
        data.host["starts"][1] += len(pieces) > 1

    monkeypatch.setattr(PassData, "fill", shifted)


def planted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window goes by places."""
    views_of = attention.views_of

    def by_place(data: attention.PagedPass, window: int | None) -> Any:
        places = data.positions.clone()
        for row, (start, end) in enumerate(pairwise(data.starts.tolist())):
            places[0, start:end] = data.lengths[row] + torch.arange(end - start)
        return views_of(replace(data, positions=places), window)

    monkeypatch.setattr(attention, "views_of", by_place)
    compute = Program.__call__

    def compiled_by_place(
        self: Program, cache: Any, tokens: Any, positions: Any, slots: Any, data: attention.PagedPass, *more: Any
    ) -> Any:
        places = np.concatenate([
            length + np.arange(end - start)
            for length, (start, end) in zip(data.lengths.tolist(), pairwise(data.starts.tolist()), strict=True)
        ])  # fmt: skip
        return compute(self, cache, tokens, places, slots, data, *more)

    monkeypatch.setattr(Program, "__call__", compiled_by_place)


def planted_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a second pass write over those of the first."""
    monkeypatch.setattr(Piece, "earlier", property(lambda piece: passes.NOTHING))


PLANTED = {
    planted_pages: "llama",
    planted_ancestors: "llama",
    planted_starts: "llama",
    planted_positions: "mistral",
    planted_slots: "llama",
}


@BOTH
@pytest.mark.parametrize(("plant", "family"), PLANTED.items(), ids=lambda one: getattr(one, "__name__", one))
def test_planted_errors_are_found_by_the_check(
    plant: Any, family: str, captured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if captured:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    assert type(engine_for(target_of(family), 1024)) is PagedEngine
    plant(monkeypatch)
    assert type(engine_for(target := target_of(family), 1024)) is EagerEngine
    said = capsys.readouterr().err
    assert captured == ("without CUDA graphs, and slower" in said)
    kind = "static" if captured else None
    assert "off those of plain passes" in str(selfcheck._paged_problem(target, kind))


WRONG = {
    "a sibling is seen": lambda depths, seen: (depths, np.tri(*seen.shape, seen.shape[1] - seen.shape[0], dtype=bool)),
    "positions are one off": lambda depths, seen: (depths + 1, seen),
    "the root is not seen": lambda depths, seen: (depths, seen & (np.arange(seen.shape[1]) > 0)),
}


@BOTH
@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.bfloat16])  # the coarsest
def test_rounding_is_told_from_errors_in_half_precision(
    default_model_file: Any, dtype: torch.dtype, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model(default_model_file, dtype=dtype)[0]
    kind, crowd = "static" if captured else None, selfcheck.Crowd
    assert selfcheck._paged_problem(target, kind) is None
    sound = crowd.forward
    for wrong in WRONG.values():
        monkeypatch.setattr(
            crowd, "forward", lambda self, tokens, *given, wrong=wrong: sound(self, tokens, *wrong(*given))
        )
        assert "off those of plain passes" in str(selfcheck._paged_problem(target, kind))


def test_what_is_read_beside_nodes_fills_their_pass_up(model: Any) -> None:
    engine = PagedEngine(model, captured=True)
    assert [engine.fitting(nodes, 100) for nodes in (0, 1, 64, 150, 500, 512, 600)] == [
        100,
        127,
        192,
        106,
        12,
        100,
        168,
    ]
    assert engine.fitting(64, 0) == 0 and engine.fitting(64, 4096) == 448
    assert PagedEngine(model).fitting(64, 100) == 100
    engine.widest = 16  # memory is short
    assert [engine.fitting(nodes, 100) for nodes in (1, 15, 16)] == [15, 1, 100]
