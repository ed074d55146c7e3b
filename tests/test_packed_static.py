"""Many texts in passes of fixed shapes, against plain passes; on a CPU nothing is captured, all else is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from test_batch import alone, asked, check_left_behind, run, text_of
from test_static_engine import STATIC, ancestry, story, tokens_of
from torch import Tensor

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.batching.seats import crowd_problem, packed_or_apart
from draftgraph.compiled.passes import WORD
from draftgraph.engine import packed_graph, packed_pass, packed_static
from draftgraph.engine.capture import Captured
from draftgraph.engine.packed import PackedEngine, Part
from draftgraph.engine.packed_graph import NAME
from draftgraph.engine.packed_pass import Kind, PackedPassData, Piece, lay_out
from draftgraph.engine.packed_static import NODES, PackedStaticEngine, StaticSeat
from draftgraph.engine.pages import PAGE
from draftgraph.engine.runner import EagerEngine
from draftgraph.engine.sampler import Sampling, Warping
from draftgraph.kernels.fused import MOVED_TOGETHER
from draftgraph.kernels.sampling import sample_reference
from draftgraph.noise import CHOICE, KeyedNoise, signed
from draftgraph.ranking import Ranking

ROOT = np.array([0]), np.ones((1, 1), dtype=bool)


def seat_of(model: Any, slots: int = 4096) -> StaticSeat:
    """In an engine where another text holds every other page of the first few."""
    engine = PackedStaticEngine(model, slots)
    other, seat = engine.open(), engine.open()
    for length in range(PAGE, 4 * PAGE + 1, PAGE):
        other.reserve(length)
        seat.reserve(length)
    return seat


@pytest.mark.parametrize("name", [*STATIC, "gpt_oss"])
def test_says_what_plain_passes_say(name: str) -> None:
    model = target_of(name)
    for found, expected in zip(story(seat_of(model), model), story(EagerEngine(model), model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation != NAME


class Watched(PackedStaticEngine):
    """Tells what kinds of passes were made."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self.kinds: list[Kind] = []

    def _launch(self, recorded: Any, pieces: list[Piece], last: bool) -> Tensor:
        self.kinds.append(recorded.data.kind)
        return super()._launch(recorded, pieces, last)


def plain(model: Any, text: list[int]) -> Tensor:
    return model(torch.tensor([text])).logits[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return target_of("llama", dtype=torch.float64)


@torch.no_grad()
def test_passes_are_of_few_shapes(model: Any) -> None:
    engine, draw = Watched(model, 8192), random.Random(0)
    seats = [engine.open() for _ in range(20)]
    for _ in range(25):
        here = draw.sample(seats, draw.choice([1, 2, 5, 17]))
        parts = [
            Part.of_text(seat, tokens_of(draw.choice([1, 3, 20]), draw.randrange(9)).tolist(), True) for seat in here
        ]
        for part, logits in zip(parts, engine.run(parts), strict=True):
            expected = plain(model, [*part.seat.text, *part.tokens.tolist()])[-len(part.tokens) :]
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
            part.commit()
    assert len(engine._passes) == len(set(engine.kinds)) < 15
    for kind in engine.kinds:
        assert kind.nodes in NODES and kind.texts in packed_static.TEXTS and kind.words == 1


@torch.no_grad()
def test_long_prompts_are_read_in_several_passes(model: Any) -> None:
    engine = Watched(model, 8192)
    reading, stepping = engine.open(), engine.open()
    stepping.prefill([1, 2, 3])
    prompt, engine.kinds = tokens_of(1100).tolist(), []
    parts = [Part.of_text(stepping, [4, 5], scored=True), Part.of_text(reading, prompt)]
    logits, nothing = engine.run(parts)
    assert nothing.shape == (0, VOCAB) and reading.scratch == 1100
    assert [(kind.nodes, kind.texts, kind.words, kind.scored) for kind in engine.kinds] == [
        (512, 4, 8, 64),
        (512, 4, 8, 64),
        (128, 4, 8, 64),
    ]
    torch.testing.assert_close(logits, plain(model, [1, 2, 3, 4, 5])[-2:], rtol=1e-9, atol=1e-9)
    assert stepping.rank(logits).tokens.tolist() == Ranking.of(logits).tokens.tolist()
    parts[1].commit()
    found = reading.forward(np.array([7]), *ROOT)
    torch.testing.assert_close(found, plain(model, [*prompt, 7])[-1:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_what_steps_and_prompts_need_can_be_recorded_before(model: Any) -> None:
    engine = Watched(model, 8192)
    engine.prepare(5)
    recorded = set(engine._passes)
    assert {kind.texts for kind in recorded} == {1, 4, 16} and {kind.nodes for kind in recorded} == set(NODES)
    seats, engine.kinds = [engine.open() for _ in range(5)], []
    for length in (1, 3, 40):
        engine.run([Part.of_text(seat, tokens_of(length).tolist(), True) for seat in seats])
        for seat in seats:
            seat.forget(0)
    for length in (2, 70, 256, 600):
        prompt = Part.of_text(seats[0], tokens_of(length).tolist())
        for beside in (1, 30):
            engine.run([prompt, *(Part.of_text(seat, tokens_of(beside).tolist(), True) for seat in seats[1:])])
            for seat in seats:
                seat.forget(0)
    assert set(engine._passes) == recorded == set(engine.kinds) | recorded
    reader = Watched(model, 8192)
    reader.prepare_reading(5)
    recorded = set(reader._passes)
    for length in (1, 100, 300):
        reader.run([Part.of_text(reader.open(), tokens_of(length).tolist()) for _ in range(3)])
    assert set(reader._passes) == recorded and len(recorded) < len(engine._passes) // 2


@torch.no_grad()
def test_a_tree_may_be_wider_than_a_pass(model: Any) -> None:
    seat, tokens = seat_of(model), tokens_of(600, 1)
    seat.prefill([1, 2, 3])
    depths, visible = ancestry(np.minimum(np.random.default_rng(4).integers(0, 600, 600), np.arange(-1, 599)))
    logits = seat.engine.run([Part(seat, tokens, depths, visible)])[0]
    for node in range(0, 600, 37):
        expected = plain(model, [1, 2, 3, *tokens[np.flatnonzero(visible[node])].tolist()])[-1]
        torch.testing.assert_close(logits[node], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_kinds_that_nobody_needs_any_more_go(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_static, "KINDS", 2)
    seat = seat_of(model)
    for nodes in (1, 9, 8, 17, 5, 16):
        found = seat.engine.run([Part.of_text(seat, tokens_of(nodes).tolist(), True)])[0]
        torch.testing.assert_close(found, plain(model, tokens_of(nodes).tolist()), rtol=1e-9, atol=1e-9)
        seat.forget(0)
    assert [kind.nodes for kind in seat.engine._passes] == [8, 16]


@torch.no_grad()
def test_more_nodes_and_texts_than_a_pass_holds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_static, "TEXTS", (1, 4))
    engine = Watched(model, 8192)
    engine.widest = 32
    parents = np.minimum(np.random.default_rng(4).integers(0, 40, 80), np.arange(-1, 79))
    depths, visible = ancestry(parents)
    tokens = tokens_of(80, 1)
    seats = [engine.open() for _ in range(6)]
    for number, seat in enumerate(seats):
        seat.prefill([number + 1] * (3 + number))
    parts = [
        Part(seat, tokens[:count], depths[:count], visible[:count, :count])
        for seat, count in zip(seats, (3, 80, 9, 1, 1, 20), strict=True)
    ]
    engine.kinds = []
    for part, logits in zip(parts, engine.run(parts), strict=True):
        assert len(logits) == len(part.tokens)
        for node in range(len(logits)):
            path = tokens[np.flatnonzero(visible[node])].tolist()
            torch.testing.assert_close(logits[node], plain(model, [*part.seat.text, *path])[-1], rtol=1e-9, atol=1e-9)
        ranking, expected = part.seat.rank(logits), Ranking.of(logits)
        assert ranking.tokens.tolist() == expected.tokens.tolist()
    assert len(engine.kinds) > 3 and {kind.nodes for kind in engine.kinds} <= {8, 16, 32}


@torch.no_grad()
def test_a_text_may_outgrow_the_tables(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_static, "FIRST_TABLE", 2)
    seat, text = seat_of(model), tokens_of(300).tolist()
    for start in range(0, 300, 30):
        seat.prefill(text[start : start + 30])
        found = seat.forward(np.array([7]), *ROOT)
        torch.testing.assert_close(found, plain(model, [*text[: start + 30], 7])[-1:], rtol=1e-9, atol=1e-9)
        seat.forget(0)
    assert seat.engine.most_pages == 32


class TestMoves:
    def test_each_texts_moves_stay_together(self) -> None:
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

    @pytest.mark.parametrize("depth", [3, 40])  # in the next pass; and a path too long for that
    @torch.no_grad()
    def test_accepted_nodes_go_to_their_places(self, model: Any, depth: int) -> None:
        engine = PackedStaticEngine(model, 8192)
        seats, chain = [engine.open() for _ in range(5)], np.arange(depth)
        parents = np.concatenate([[-1], np.repeat(chain, 2)])  # every other node goes on
        parents[1:] = np.where(parents[1:] > 0, 2 * parents[1:], 0)
        depths, visible = ancestry(parents)
        path = [0, *(2 * (chain + 1)).tolist()]
        texts = []
        for number, seat in enumerate(seats):
            seat.prefill(tokens_of(11 + number, number).tolist())
            tokens = tokens_of(len(parents), 9 + number)
            seat.forward(tokens, depths, visible)
            seat.commit(path, tokens[path].tolist())
            texts.append(seat.text)
        assert depth > MOVED_TOGETHER or len(engine._moves) == 1  # every pass took those of the one before
        engine.run([Part(seat, np.array([1]), *ROOT) for seat in seats])
        assert not engine._moves
        for seat, text in zip(seats, texts, strict=True):
            seat.forget(0)
            found = seat.forward(np.array([3]), *ROOT)
            torch.testing.assert_close(found, plain(model, [*text, 3])[-1:], rtol=1e-9, atol=1e-9)

    @torch.no_grad()
    def test_more_than_a_pass_takes_are_made_before_it(self, model: Any) -> None:
        engine, (depths, visible) = PackedStaticEngine(model, 8192), ancestry(np.array([-1, 0, 0, 2, 2]))
        seats = [engine.open() for _ in range(9)]
        tokens = tokens_of(5)
        engine.run([Part(seat, tokens, depths, visible) for seat in seats])
        for seat in seats:
            seat.commit([0, 2, 4], tokens[[0, 2, 4]].tolist())
        assert len(engine._moves) == 9
        for seat in seats:  # in a pass for one text
            found = seat.forward(np.array([3]), *ROOT)
            torch.testing.assert_close(found, plain(model, [*seat.text, 3])[-1:], rtol=1e-9, atol=1e-9)


WARPINGS = [Warping(0.7, 5, 0.9), None, Warping(1.3), Warping(0.9, 0, 0.8, 0.05), Warping(1.0, 65), Warping(0.8, 64)]


@torch.no_grad()
def test_tokens_of_all_texts_are_sampled_in_one_go() -> None:
    model = target_of("llama")
    engine = PackedStaticEngine(model, 4096)
    sampled = [
        warping and Sampling(KeyedNoise(seed).stream_key(CHOICE), warping) for seed, warping in enumerate(WARPINGS)
    ]
    for _ in range(3):
        parts = []
        for number, sampling in enumerate(sampled):
            seat = engine.open()
            seat.prefill([number] * (number + 2))
            parts.append(Part(seat, tokens_of(3, number), np.arange(3), np.tri(3, dtype=bool), sampling=sampling))
        for part, logits, sampling in zip(parts, engine.run(parts), sampled, strict=True):
            if sampling is None:
                continue
            found = part.seat.sample(logits, sampling)
            if sampling.warping.top_k > 64:
                assert found is None  # left to the host
                continue
            told = [
                torch.tensor([n], dtype=torch.float64)
                for n in (sampling.warping.temperature, sampling.warping.top_p, sampling.warping.min_p)
            ]
            positions = len(part.seat.text) + part.depths + 1
            expected = sample_reference(
                logits, torch.tensor([signed(sampling.key)]), torch.from_numpy(positions), *told, sampling.warping.top_k
            )
            assert found == expected.tolist()
            assert part.seat.sample(logits, Sampling(3, Warping())) is None
        sampled.reverse()


def test_sampled_texts_are_chosen_for_on_the_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = GraphDecoder(model, perturbed(model))
    jobs = asked(12, seed=5)
    texts = [text_of(decoder, *job) for job in jobs]
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    batch = Batch(decoder, 16384, texts=8)
    assert isinstance(batch.target, PackedStaticEngine) and isinstance(batch.draft, PackedStaticEngine)
    asked_host: list[int] = []
    choose = packed_static.StaticSeat.sample

    def watched(seat: StaticSeat, logits: Tensor, sampling: Sampling) -> list[int] | None:
        found = choose(seat, logits, sampling)
        asked_host.append(found is None)
        return found

    monkeypatch.setattr(packed_static.StaticSeat, "sample", watched)
    run(batch, texts)
    assert asked_host and not any(asked_host)
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


def test_without_memory_for_sampling_the_host_chooses(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    decoder = GraphDecoder(model)
    jobs = asked(9, seed=5)
    texts = [text_of(decoder, *job) for job in jobs]
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    batch = Batch(decoder, 16384, texts=8)
    monkeypatch.setattr(PackedStaticEngine, "_sampler", refuse)
    run(batch, texts)
    assert capsys.readouterr().err.count("no GPU memory for sampling") == 1
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)


class ShortOfMemory(Captured):
    """Records nothing that is wider than this."""

    most = 16

    def __init__(self, compute: Any, device: torch.device, pool: Any = None) -> None:
        super().__init__(compute, device, pool)
        found = self()
        if found is not None and len(found) > self.most:
            raise torch.OutOfMemoryError


def test_passes_are_smaller_where_memory_is_short(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = GraphDecoder(model)
    jobs = asked(12, seed=6)
    texts = [text_of(decoder, *job) for job in jobs]
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    batch = Batch(decoder, 16384, texts=12)
    monkeypatch.setattr(packed_static, "Captured", ShortOfMemory)
    run(batch, texts)
    said = capsys.readouterr().err
    assert isinstance(batch.target, PackedStaticEngine) and batch.target.widest == 16
    assert said.count("no GPU memory for passes of") == said.count("\n") > 0
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)


def test_without_memory_for_any_pass_texts_fail_and_not_the_process(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = GraphDecoder(model)
    texts = [text_of(decoder, [1, 2, 3], {"max_new_tokens": 4}, GraphConfig(mode="off"), seed) for seed in range(3)]
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    batch = Batch(decoder, 4096, texts=4)
    monkeypatch.setattr(packed_static, "Captured", ShortOfMemory)
    monkeypatch.setattr(ShortOfMemory, "most", 0)
    for text in texts:
        batch.add(text)
    while batch.busy:
        batch.step()
    assert all("has no memory left for a pass" in str(text.failure) for text in texts)
    check_left_behind(batch)


def planted_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row, as they mostly lie."""
    monkeypatch.setattr(
        StaticSeat, "table", property(lambda seat: seat.pages[0] + np.arange(len(seat.pages), dtype=np.int32))
    )


def planted_ancestors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is seen as ever, a tree as a chain."""
    visible = Piece.visible.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Piece, "visible", property(lambda piece: np.tri(*visible(piece).shape, piece.scratch - len(piece), dtype=bool))
    )


def planted_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text gets a node of the second."""
    fill = PackedPassData.fill

    def shifted(data: PackedPassData, pieces: list[Piece]) -> None:
        fill(data, pieces)
        data.host["starts"][1] += len(pieces) > 1

    monkeypatch.setattr(PackedPassData, "fill", shifted)


def planted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window goes by places."""
    seen = packed_graph.visible_slots

    def by_place(data: Any, text: int, start: int, end: int, window: int | None) -> Any:
        places = data.lengths[text] + torch.arange(data.positions.shape[1])[None] - start
        return seen(replace(data, positions=places), text, start, end, window)

    monkeypatch.setattr(packed_graph, "visible_slots", by_place)


def planted_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a second pass write over those of the first."""
    monkeypatch.setattr(Piece, "earlier", property(lambda piece: packed_pass.NOTHING))


PLANTED = {
    planted_pages: "llama",
    planted_ancestors: "llama",
    planted_starts: "llama",
    planted_positions: "mistral",
    planted_slots: "llama",
}


@pytest.mark.parametrize(("plant", "family"), PLANTED.items(), ids=lambda one: getattr(one, "__name__", one))
def test_planted_errors_are_found_by_the_check(
    plant: Any, family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = target_of(family)
    assert crowd_problem(target, PackedStaticEngine) is None
    plant(monkeypatch)
    assert "off those of plain passes" in str(crowd_problem(target, PackedStaticEngine))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    assert type(packed_or_apart(target, 1024, 2)) is PackedEngine
    assert "without CUDA graphs, and slower" in capsys.readouterr().err


def test_data_lies_where_it_is_told() -> None:
    """All parts of the one buffer, of three dtypes, and none over another."""
    data = PackedPassData(Kind(8, 4, 2, 8), 5, 640, torch.device("cpu"))
    for number, part in enumerate(data.host.values()):
        part[...] = number
    data.arrive()
    for number, part in enumerate(data.host.values()):
        assert (part == number).all()
    assert data.packed.pages.shape == (4, 5) and data.packed.pages.dtype == torch.int32
    assert (data.packed.pages == list(data.host).index("pages")).all()
    assert data.sampling[1].dtype == torch.float64 and data.packed.scratch_positions.shape[1] == 2 * WORD
