"""The static engine and the draft that grows on it, against plain passes; on a CPU nothing is captured, all else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.choose import DraftNoise
from draftgraph.cost import FlatCost
from draftgraph.drafting import device
from draftgraph.drafting.device import WIDTH, DeviceDraft
from draftgraph.drafting.model import DraftVocabulary, ModelProposer
from draftgraph.engine import static
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.capture import Captured
from draftgraph.engine.graph_attention import NAME
from draftgraph.engine.runner import EagerEngine, Engine
from draftgraph.engine.static import StaticEngine
from draftgraph.errors import DraftGraphError
from draftgraph.graph import ROOT, TokenGraph
from draftgraph.noise import CHOICE, KeyedNoise

STATIC = ("llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "mixtral")
PARENTS = np.array([-1, 0, 0, 1, 2, 1, 3, 0])


def ancestry(parents: Any) -> tuple[Any, Any]:
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        visible[node] |= visible[parent]
    return visible.sum(axis=1) - 1, visible


def tokens_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def story(engine: Engine, model: Any) -> list[torch.Tensor]:
    """Text in chunks, a tree in two passes, a commit that moves slots, more text behind it, a way back."""
    tokens, (depths, visible) = tokens_of(len(PARENTS), 1), ancestry(PARENTS)
    root = np.array([0]), np.ones((1, 1), dtype=bool)
    with Loan(model):
        engine.begin(0, False)
        engine.prefill(tokens_of(21).tolist(), chunk=8)
        scored = [engine.forward(tokens[:3], depths[:3], visible[:3, :3]).clone()]
        scored.append(engine.forward(tokens[3:], depths[3:], visible[3:]).clone())
        path = [0, 1, 3, 6]
        engine.commit(path, tokens[path].tolist())
        scored.append(engine.forward(tokens_of(1, 2), *root).clone())
        engine.commit([0], tokens_of(1, 2).tolist())
        engine.rewind(12)
        engine.prefill([5, 6])
        scored.append(engine.forward(tokens_of(1, 3), *root).clone())
    return scored


@pytest.mark.parametrize("name", STATIC)
def test_says_what_plain_passes_say(name: str) -> None:
    model = target_of(name)
    for found, expected in zip(story(StaticEngine(model), model), story(EagerEngine(model), model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_wide_and_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More nodes than the widest pass, more than a word of ancestors, and more slots than there were."""
    monkeypatch.setattr(static, "SMALLEST_CAPACITY", 16)
    model = target_of("mistral")
    count = static.WIDTHS[-1] + 9
    parents = np.concatenate([[-1], np.random.default_rng(4).integers(0, 40, 40), np.arange(40, count - 1)])
    parents = np.minimum(parents, np.arange(-1, count - 1))
    depths, visible = ancestry(parents)
    scored = []
    for engine in (StaticEngine(model), EagerEngine(model)):
        with Loan(model):
            engine.prefill(tokens_of(13).tolist())
            scored.append(engine.forward(tokens_of(count, 1), depths, visible).clone())
    torch.testing.assert_close(*scored, rtol=1e-4, atol=1e-5)


def test_text_outlives_the_slots_it_was_read_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "SMALLEST_CAPACITY", 16)
    model = target_of("llama")
    one, other = StaticEngine(model), EagerEngine(model)
    scored = []
    for engine in (one, other):
        with Loan(model):
            engine.prefill(tokens_of(30).tolist())
            engine.reserve(900)
            engine.prefill(tokens_of(30, 1).tolist())
            scored.append(engine.forward(tokens_of(1, 2), np.array([0]), np.ones((1, 1), dtype=bool)).clone())
    assert one.capacity >= 900 + static.WIDTHS[-1]
    torch.testing.assert_close(*scored, rtol=1e-4, atol=1e-5)


def test_the_users_attention_is_put_back() -> None:
    model = target_of("gemma2")
    before = model.config._attn_implementation
    engine = StaticEngine(model)
    story(engine, model)
    assert model.config._attn_implementation == before != NAME


@torch.no_grad()
def test_other_weights_are_noticed() -> None:
    model = target_of("llama")
    engine = StaticEngine(model)
    engine.prefill([1, 2, 3])
    engine.forward(tokens_of(1), np.array([0]), np.ones((1, 1), dtype=bool))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    engine.begin(5, reuse=True)
    assert not engine.text and not engine._passes


def drafter(model: Any, ends: frozenset[int] = frozenset(), k: int = 4) -> DeviceDraft:
    draft = DeviceDraft(StaticEngine(model), DraftVocabulary(model, VOCAB), k)
    draft.begin_text(ends)
    return draft


def plain_probabilities(model: Any, text: list[int], path: list[int], noise: DraftNoise | None) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([text + path])).logits[:, -1].float()
    if noise is not None:
        logits = noise(logits, np.array([len(text) + len(path)]))
    return torch.softmax(logits, dim=-1)[0]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_a_draft_grows_the_likeliest_nodes(name: str, sampled: bool) -> None:
    """Level by level, every proposal is a plain pass's best, and what is expanded is the best of what was open."""
    model, text, levels = target_of(name), tokens_of(19).tolist(), 3
    draft = drafter(model)
    draft.perturb = noise = DraftNoise(KeyedNoise(3), 0.8, CHOICE) if sampled else None
    draft.levels = levels
    draft.catch_up(text[:9])
    draft.begin(text)
    drafted = draft.drafted()
    assert drafted is not None and drafted.tokens.shape == (1 + (levels - 1) * WIDTH, 4)
    paths: dict[int, tuple[list[int], float]] = {-1: ([], 1.0)}
    waiting: dict[int, float] = {}
    for node, row in drafted.expansion_of.items():
        path, score = paths[node]
        plain = plain_probabilities(model, text, path, noise)
        best = torch.topk(plain, 4)
        assert drafted.tokens[row].tolist() == best.indices.tolist()
        np.testing.assert_allclose(drafted.probs[row], best.values.numpy(), rtol=1e-3)
        if row and row % WIDTH == 1 % WIDTH:
            chosen = [other for other, at in drafted.expansion_of.items() if row <= at < row + WIDTH]
            least = min(waiting[other] for other in chosen)
            assert all(waiting[other] <= least * 1.001 for other in waiting if other not in chosen)
            for other in chosen:
                del waiting[other]
        for rank, (token, chance) in enumerate(zip(drafted.tokens[row], drafted.probs[row], strict=True)):
            paths[row * 4 + rank] = [*path, int(token)], score * chance
            waiting[row * 4 + rank] = score * chance


def proposed_by_levels(place: str, sampled: bool, tokens: list[int] | None, size: int) -> list[Any]:
    """What a draft proposes at the root and two levels below it, one pass each; new text is read at the root."""
    model, text = target_of("llama").to(place), tokens_of(12).tolist()
    if tokens is not None:
        model.token_map = torch.tensor(tokens)
    noise = DraftNoise(KeyedNoise(3), 0.8, CHOICE) if sampled else None
    draft = ModelProposer(StaticEngine(model), DraftVocabulary(model, size), 4, noise)
    draft.engine.prefill(text[:9])
    draft.begin(text)
    graph = TokenGraph(text[-1], GraphConfig(mode="tree", theta_prob=0.0, theta_sib=0.0))
    said, frontier = [], [ROOT]
    for _ in range(3):
        said.append(draft.propose(graph, frontier))
        graph.extend(frontier, np.ones(len(frontier)), *said[-1], "draft")
        graph.close(frontier)
        frontier = graph.frontier(graph.unroll())[0][:5]
    return said


WRITTEN = np.random.default_rng(5).permutation(VOCAB)[:40].tolist()


@pytest.mark.parametrize("size", [VOCAB // 2, VOCAB, VOCAB + 9])
@pytest.mark.parametrize("tokens", [None, WRITTEN])
@pytest.mark.parametrize("sampled", [False, True])
@torch.no_grad()
def test_what_is_recorded_behind_a_pass_is_what_its_logits_say(
    sampled: bool, tokens: list[int] | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = proposed_by_levels("cpu", sampled, tokens, size)
    asked: list[int] = []
    monkeypatch.setattr(StaticEngine, "proposed", lambda self, logits: asked.append(len(logits)))
    same_proposals(recorded, proposed_by_levels("cpu", sampled, tokens, size))
    assert asked == [3, 4, 5]
    assert all((children < size).all() for children, _ in recorded)


def same_proposals(some: list[Any], others: list[Any]) -> None:
    for (tokens, probs), (expected, values) in zip(some, others, strict=True):
        assert tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(probs, values, rtol=1e-3)


@torch.no_grad()
def test_nothing_is_drafted_behind_an_end() -> None:
    model, text = target_of("llama"), tokens_of(19).tolist()
    first = drafter(model)
    first.begin(text)
    found = first.drafted()
    assert found is not None and 0 in found.expansion_of
    end = int(found.tokens[0, 0])
    stopped = drafter(model, frozenset({end}))
    stopped.begin(text)
    found = stopped.drafted()
    assert found is not None and int(found.tokens[0, 0]) == end
    row = found.expansion_of.get(0)
    assert row is None or not found.probs[row].any()


@pytest.mark.parametrize("style", [{}, {"do_sample": True, "temperature": 0.9, "seed": 5, "top_k": 0}])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_promise_holds(name: str, style: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of(name)
    asked: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 40} | style
    plain = GraphDecoder(model).generate(**asked, config=GraphConfig(mode="off"))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    assert isinstance(decoder.target_engine, StaticEngine) and isinstance(decoder.draft_engine, StaticEngine)
    for config in (GraphConfig(cost=FlatCost()), GraphConfig(mode="graph", tau=1), GraphConfig(mode="chain")):
        found = decoder.generate(**asked, config=config)
        assert found.sequences.tolist() == plain.sequences.tolist(), config.mode
        assert found.stats.mean_accepted_length > 1.2, (config.mode, found.stats)


ASKED: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 40}


@pytest.mark.parametrize("style", [{}, {"do_sample": True, "temperature": 1.2, "seed": 5, "top_k": 0}])
def test_a_chain_from_the_device_is_the_one_that_is_grown_level_by_level(
    style: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ends = target_of("llama"), list(range(0, VOCAB, 5))
    asked = ASKED | style | {"eos_token_id": ends, "min_new_tokens": 40}
    drafted = []
    for engine in ("eager", "static"):
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
        steps: list[Any] = []
        decoder = GraphDecoder(model, perturbed(model, 0.3), GraphConfig(mode="chain"), steps.append)
        decoder.generate(**asked)
        drafted.append(steps)
    assert any(1 < len(step.tree) < 6 and step.tree.tokens[-1] in ends for step in drafted[1])
    for level_by_level, at_once in zip(*drafted, strict=True):
        assert at_once.tree.tokens.tolist() == level_by_level.tree.tokens.tolist()
        np.testing.assert_allclose(at_once.tree.scores, level_by_level.tree.scores, rtol=1e-3)
        np.testing.assert_allclose(at_once.graph.probs, level_by_level.graph.probs, rtol=1e-3)
        for name in ("tokens", "parents", "depths", "states", "drafted", "sources", "max_depth"):
            assert getattr(at_once.graph, name) == getattr(level_by_level.graph, name), name


def static_decoder(monkeypatch: pytest.MonkeyPatch) -> tuple[GraphDecoder, list[list[int]]]:
    """A pair on static engines, and what plain decoding says."""
    model = target_of("llama")
    plain = GraphDecoder(model).generate(**ASKED, config=GraphConfig(mode="off"))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    return GraphDecoder(model, perturbed(model, 0.1)), plain.sequences.tolist()


@pytest.mark.parametrize("short", [0, 7, 512])
def test_texts_are_read_the_same_in_recorded_passes(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "SHORT", short)
    decoder, plain = static_decoder(monkeypatch)
    assert isinstance(decoder.target_engine, StaticEngine)
    assert decoder.generate(**ASKED).sequences.tolist() == plain


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_that_break_cost_a_draft_its_acceptance_and_a_target_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    target, draft = target_of("llama").to(place), perturbed(target_of("llama"), 0.1).to(place)
    decoder = GraphDecoder(target, draft)
    plain = decoder.generate(**ASKED, config=GraphConfig(mode="off")).sequences.tolist()
    draft.lm_head.weight.data.fill_(torch.nan)
    for config in (GraphConfig(cost=FlatCost()), GraphConfig(mode="graph"), GraphConfig(mode="chain")):
        assert decoder.generate(**ASKED, config=config).sequences.tolist() == plain, config.mode
    target.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(DraftGraphError, match="logits are not finite"):
        decoder.generate(**ASKED)


class ShortOfMemory(Captured):
    """Records nothing that is wider than this."""

    most = 4

    def __init__(self, compute: Any, device: torch.device, pool: Any = None) -> None:
        super().__init__(compute, device, pool)
        if len(self()) > self.most:
            raise torch.OutOfMemoryError


def test_wide_trees_are_checked_in_parts_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder, plain = static_decoder(monkeypatch)
    monkeypatch.setattr(static, "Captured", ShortOfMemory)
    found = decoder.generate(**ASKED, config=GraphConfig(cost=FlatCost()))
    said = capsys.readouterr().err
    assert found.sequences.tolist() == plain and found.stats.mean_accepted_length > 1.2
    assert isinstance(decoder.target_engine, StaticEngine) and decoder.target_engine.widest == 4
    assert said.count("no GPU memory for passes of") == said.count("\n")


def test_without_memory_for_drafting_the_text_still_proposes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    decoder, plain = static_decoder(monkeypatch)
    monkeypatch.setattr(device, "Captured", refuse)
    for _ in range(2):
        found = decoder.generate(**ASKED, config=GraphConfig(cost=FlatCost()))
        assert found.sequences.tolist() == plain
        assert found.stats.accepted_by_source["draft"] == 0
    assert capsys.readouterr().err.count("going on without a draft model") == 1


def test_a_text_that_does_not_fit_is_refused_and_the_next_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of("llama")
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder = GraphDecoder(model, config=GraphConfig(mode="off"))
    asked: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 20}
    plain = decoder.generate(**asked).sequences.tolist()
    real = static.StaticCache

    def small(like: Any, capacity: int) -> Any:
        if capacity > 1024:
            raise torch.OutOfMemoryError
        return real(like, capacity)

    monkeypatch.setattr(static, "StaticCache", small)
    with pytest.raises(DraftGraphError, match="no memory for the keys and values of 2048 tokens"):
        decoder.generate([tokens_of(9).tolist()], max_new_tokens=1200)
    assert decoder.generate(**asked).sequences.tolist() == plain


@pytest.mark.gpu
@pytest.mark.parametrize("name", STATIC)
def test_captured_passes_say_what_plain_passes_say(name: str) -> None:
    model = target_of(name).cuda()
    engine = StaticEngine(model)
    found, again, expected = story(engine, model), story(engine, model), story(EagerEngine(model), model)
    for one, two, plain in zip(found, again, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
        torch.testing.assert_close(one, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_draft_grows_the_same_nodes() -> None:
    text, grown = tokens_of(40).tolist(), []
    for place in ("cpu", "cuda"):
        draft = drafter(target_of("llama").to(place))
        draft.perturb = DraftNoise(KeyedNoise(3), 0.8, CHOICE)
        draft.levels = 5
        draft.catch_up(text[:9])
        for end in (20, 25, 40):
            draft.begin(text[:end])
            drafted = draft.drafted()
            assert drafted is not None
            grown.append(drafted)
    for one, other in zip(grown[:3], grown[3:], strict=True):
        assert one.tokens[0].tolist() == other.tokens[0].tolist()
        np.testing.assert_allclose(one.probs[0], other.probs[0], rtol=1e-3)
        assert len(set(one.expansion_of) & set(other.expansion_of)) > 0.8 * len(one.expansion_of)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, WRITTEN])
@pytest.mark.parametrize("sampled", [False, True])
@torch.no_grad()
def test_a_captured_pass_proposes_the_same(sampled: bool, tokens: list[int] | None) -> None:
    same_proposals(*(proposed_by_levels(place, sampled, tokens, VOCAB) for place in ("cpu", "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("style", [{}, {"do_sample": True, "temperature": 0.9, "seed": 5, "top_k": 0}])
@pytest.mark.parametrize("name", STATIC)
def test_the_promise_holds_for_captured_passes(
    name: str, style: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(name).cuda()
    asked: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 60} | style
    plain = GraphDecoder(model).generate(**asked, config=GraphConfig(mode="off"))
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    assert isinstance(decoder.target_engine, StaticEngine)
    for config in (GraphConfig(mode="off"), GraphConfig(cost=FlatCost()), GraphConfig(mode="graph", tau=1)):
        assert decoder.generate(**asked, config=config).sequences.tolist() == plain.sequences.tolist(), config.mode
