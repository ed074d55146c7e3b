"""Drafts that grow on a device: the likeliest nodes by plain passes, and beside others what each proposes alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import tokens_of
from families import VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.choose import DraftNoise
from draftgraph.cost.budget import FlatCost
from draftgraph.engine import paged
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import PassResult
from draftgraph.graph import ROOT, TokenGraph
from draftgraph.noise import CHOICE, KeyedNoise
from draftgraph.proposers import device_draft
from draftgraph.proposers.device_draft import NEW_TOKENS, WIDTH, DeviceDraft, DeviceDrafts
from draftgraph.proposers.draft_model import DraftVocabulary, ModelProposer

K = 4
LENGTHS = [19, 5, 33, 16, 48]
NOISES = [None, (3, 0.8), (4, 1.2), None, (5, 0.3)]
NOBODY: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def model() -> Any:
    return target_of("llama", dtype=torch.float64)


def refuse(*_: Any) -> None:
    raise torch.OutOfMemoryError


def drafts_of(model: Any, slots: int | None = 1024, levels: int = 5) -> DeviceDrafts:
    return DeviceDrafts(PagedEngine(model, slots, captured=True), DraftVocabulary(model, VOCAB), K, levels)


def noise_of(number: int) -> DraftNoise | None:
    given = NOISES[number % len(NOISES)]
    return None if given is None else DraftNoise(KeyedNoise(given[0]), given[1], CHOICE)


def opened(drafts: DeviceDrafts, texts: list[list[int]], ends: frozenset[int] = NOBODY) -> list[DeviceDraft]:
    """Their texts have been read but for a few tokens."""
    found = []
    for number, text in enumerate(texts):
        found.append(drafts.open(drafts.engine.open(), ends))
        found[-1].perturb = noise_of(number)
        found[-1].context.prefill(text[: len(text) - number - 1])
    return found


def texts_of(count: int = len(LENGTHS)) -> list[list[int]]:
    return [tokens_of(LENGTHS[number % len(LENGTHS)], number).tolist() for number in range(count)]


def start(drafts: DeviceDrafts, own: list[DeviceDraft], texts: list[list[int]], levels: list[int]) -> None:
    for draft, text, wish in zip(own, texts, levels, strict=True):
        draft.levels = wish
        draft.begin(text)
    drafts.launch(own)


def grown_alone(model: Any, text: list[int], levels: int, number: int, ends: frozenset[int] = NOBODY) -> Any:
    drafts = drafts_of(model, None, levels)
    draft = drafts.open(drafts.engine.open(), ends)
    draft.perturb = noise_of(number)
    draft.context.prefill(text[:-1])
    start(drafts, [draft], [text], [levels])
    return np.concatenate(list(draft.arriving()))


def assert_as_alone(
    model: Any, own: list[DeviceDraft], texts: list[list[int]], levels: list[int], ends: frozenset[int] = NOBODY
) -> None:
    for number, (draft, text, wish) in enumerate(zip(own, texts, levels, strict=True)):
        if not wish:
            assert not list(draft.arriving())
            continue
        found, expected = np.concatenate(list(draft.arriving())), grown_alone(model, text, wish, number, ends)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def plain_probabilities(model: Any, text: list[int], path: list[int], noise: DraftNoise | None) -> Any:
    logits = model(torch.tensor([text + path])).logits[:, -1].float()
    if noise is not None:
        logits = noise(logits, np.array([len(text) + len(path)]))
    return torch.softmax(logits, dim=-1)[0]


@torch.no_grad()
def test_texts_that_were_missed_are_read_in_pieces_and_rest_meanwhile(model: Any) -> None:
    drafts, texts = drafts_of(model), [tokens_of(length, length).tolist() for length in (150, 90, 20)]
    own = [drafts.open(drafts.engine.open(), NOBODY) for _ in texts]
    going = []
    for _ in range(6):
        for draft, text in zip(own, texts, strict=True):
            draft.levels = 3
            draft.begin(text)
        drafts.launch(own, room=50)
        going.append([draft.levels for draft in own])
        unread = [len(text) - len(draft.context.text) for draft, text in zip(own, texts, strict=True)]
        assert sum(unread[:2]) >= 240 - 50 * len(going) - 2 * NEW_TOKENS  # which the first level reads
    assert going[0] == [0, 0, 3] and going[-1] == [3, 3, 3]
    for draft, text in zip(own, texts, strict=True):
        found, expected = np.concatenate(list(draft.arriving())), grown_alone(model, text, 3, number=0)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@torch.no_grad()
def test_a_draft_grows_the_likeliest_nodes(name: str, number: int) -> None:
    """Level by level, every proposal is a plain pass's best, and what is expanded is the best of what was open."""
    model, text, levels = target_of(name), tokens_of(19).tolist(), 3
    noise, report = noise_of(number), grown_alone(model, text, levels, number)
    assert report.shape == (1 + (levels - 1) * WIDTH, 2 * K + 1)
    tokens, probs, nodes = report[:, :K].astype(int), np.exp(report[:, K:-1]), report[:, -1].astype(int).tolist()
    expansions = {node: row for row, node in enumerate(nodes) if row == 0 or node >= 0}
    assert len(expansions) > WIDTH
    paths: dict[int, tuple[list[int], float]] = {-1: ([], 1.0)}
    waiting: dict[int, float] = {}
    for node, row in expansions.items():
        path, score = paths[node]
        best = torch.topk(plain_probabilities(model, text, path, noise), K)
        assert tokens[row].tolist() == best.indices.tolist()
        np.testing.assert_allclose(probs[row], best.values.numpy(), rtol=1e-3)
        if row and row % WIDTH == 1:
            chosen = [other for other, at in expansions.items() if row <= at < row + WIDTH]
            least = min(waiting[other] for other in chosen)
            assert all(waiting[other] <= least * 1.001 for other in waiting if other not in chosen)
            for other in chosen:
                del waiting[other]
        for rank, (token, chance) in enumerate(zip(tokens[row], probs[row], strict=True)):
            paths[row * K + rank] = [*path, int(token)], score * chance
            waiting[row * K + rank] = score * chance


@pytest.mark.parametrize("count", [1, 3, 5, 18])
@torch.no_grad()
def test_every_text_drafts_as_if_it_were_alone(model: Any, count: int) -> None:
    drafts, texts = drafts_of(model, 4096), texts_of(count)
    own, levels = opened(drafts, texts), [5] * count
    start(drafts, own, texts, levels)
    assert_as_alone(model, own, texts, levels)


@torch.no_grad()
def test_step_after_step_texts_grow_by_different_numbers_of_tokens(model: Any) -> None:
    drafts, whole = drafts_of(model), texts_of()
    own, ends = opened(drafts, [text[:5] for text in whole]), [5, 5, 5, 5, 5]
    for step in range(4):
        texts = [text[:end] for text, end in zip(whole, ends, strict=True)]
        start(drafts, own, texts, [3] * 5)
        assert_as_alone(model, own, texts, [3] * 5)
        assert [draft.context.text for draft in own] == texts
        ends = [
            min(len(text), end + 1 + (number + step) % 5)
            for number, (text, end) in enumerate(zip(whole, ends, strict=True))
        ]


@pytest.mark.parametrize("wishes", [[5, 0, 1, 2, 4], [0, 0, 0, 1, 0], [0, 3, 3, 0, 0]], ids=str)
@torch.no_grad()
def test_texts_may_want_fewer_levels_than_others_or_none(model: Any, wishes: list[int]) -> None:
    drafts, texts = drafts_of(model), texts_of()
    own = opened(drafts, texts)
    before = [list(draft.context.text) for draft in own]
    start(drafts, own, texts, wishes)
    assert_as_alone(model, own, texts, wishes)
    assert drafts.fed[1:] == [8 * sum(wish > level for wish in wishes) for level in range(1, max(wishes))]
    for draft, text, wish, known in zip(own, texts, wishes, before, strict=True):
        assert draft.context.text == (text if wish else known) and draft.passes == wish


@torch.no_grad()
def test_nobody_writes_into_another_text(model: Any) -> None:
    drafts, texts = drafts_of(model), texts_of()
    own = opened(drafts, texts)
    engine: Any = drafts.engine
    blocks = list(engine.cache.blocks.values())
    kept = [block.clone() for block in blocks]
    start(drafts, own, texts, [0, 5, 2, 1, 0])
    may_change = {engine.slots}
    for draft, text in zip(own, texts, strict=True):
        places = range(len(text) - 1 - own.index(draft), len(draft.context.pages) * PAGE)
        may_change |= {draft.context.pages[place // PAGE] * PAGE + place % PAGE for place in places}
    others = [slot for slot in range(engine.slots + PAGE) if slot not in may_change]
    for block, before in zip(blocks, kept, strict=True):
        assert torch.equal(block[:, :, others], before[:, :, others])


@torch.no_grad()
def test_who_has_paused_reads_what_he_missed(model: Any) -> None:
    drafts, texts = drafts_of(model), [tokens_of(70, number).tolist() for number in range(3)]
    own = opened(drafts, [text[:10] for text in texts])
    for draft, wish in zip(own, (2, 0, 3), strict=True):
        draft.levels = wish
    ends = [12, 70, 10 + NEW_TOKENS]
    shown = [text[:end] for text, end in zip(texts, ends, strict=True)]
    start(drafts, own, shown, [2, 3, 3])
    assert_as_alone(model, own, shown, [2, 3, 3])


@torch.no_grad()
def test_a_step_may_be_begun_again(model: Any) -> None:
    drafts, texts = drafts_of(model), texts_of(2)
    own = opened(drafts, texts)
    for _ in range(2):
        start(drafts, own, texts, [3, 3])
        assert_as_alone(model, own, texts, [3, 3])


@torch.no_grad()
def test_nothing_is_drafted_behind_an_end(model: Any) -> None:
    texts = texts_of(3)
    ends = frozenset(int(grown_alone(model, text, 1, number)[0, 0]) for number, text in enumerate(texts))
    assert 0 in grown_alone(model, texts[0], 4, 0)[:, -1]  # else its best child is drafted behind
    drafts = drafts_of(model)
    own = opened(drafts, texts, ends)
    start(drafts, own, texts, [4, 4, 4])
    assert_as_alone(model, own, texts, [4, 4, 4], ends)
    for draft in own:
        report = np.concatenate(list(draft.arriving()))
        assert int(report[0, 0]) in ends and 0 not in report[:, -1]


@torch.no_grad()
def test_without_room_for_its_nodes_a_text_does_not_draft(model: Any) -> None:
    drafts, texts = drafts_of(model, slots=96), [tokens_of(30).tolist(), tokens_of(30, 1).tolist()]
    own = opened(drafts, texts)
    start(drafts, own, texts, [5, 5])
    assert [draft.levels for draft in own] == [5, 0] and not list(own[1].arriving())
    assert_as_alone(model, own[:1], texts[:1], [5])


@torch.no_grad()
def test_without_memory_nobody_drafts(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_draft, "Captured", refuse)
    drafts, texts = drafts_of(model), texts_of(2)
    own = opened(drafts, texts)
    for _ in range(2):
        start(drafts, own, texts, [3, 3])
        assert [draft.levels for draft in own] == [0, 0] and not list(own[0].arriving())
    assert capsys.readouterr().err.count("going on without a draft model") == 1


@torch.no_grad()
def test_tables_grow_with_the_texts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draft, "PAGES", 8)
    drafts, texts = drafts_of(model), [tokens_of(length).tolist() for length in (9, 180)]
    own = opened(drafts, texts)
    for shown in ([text[:9] for text in texts], texts):
        for draft, text in zip(own, shown, strict=True):
            draft.context.rewind(0)
            draft.context.prefill(text[:-1])
        start(drafts, own, shown, [3, 3])
        assert_as_alone(model, own, shown, [3, 3])
    assert drafts.pages >= 180 // PAGE


@torch.no_grad()
def test_levels_before_the_last_arrive_early(model: Any) -> None:
    drafts, texts = drafts_of(model), texts_of(3)
    own = opened(drafts, texts)
    start(drafts, own, texts, [5, 4, 1])
    parts = [[len(part) for part in draft.arriving()] for draft in own]
    assert parts == [[25, 8], [25], [1]]


@torch.no_grad()
def test_more_texts_than_any_program_holds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_draft, "SEQUENCES", (1, 2))
    drafts, texts = drafts_of(model), texts_of(3)
    own = opened(drafts, texts)
    start(drafts, own, texts, [2, 2, 2])
    assert_as_alone(model, own, texts, [2, 2, 0])


@pytest.mark.parametrize("family", ["gemma2", "qwen2_window", "gpt2"])
@torch.no_grad()
def test_other_families(family: str) -> None:
    model = perturbed(target_of(family, dtype=torch.float64), 0.1)
    drafts, texts = drafts_of(model), texts_of(4)
    own = opened(drafts, texts)
    start(drafts, own, texts, [4, 2, 0, 4])
    assert_as_alone(model, own, texts, [4, 2, 0, 4])


@torch.no_grad()
def test_a_pool_that_grows_leaves_drafts_as_they_were(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "SMALLEST", 256)
    drafts, texts = drafts_of(model, None), texts_of(3)
    own = opened(drafts, texts)
    start(drafts, own, texts, [3, 3, 3])
    grown = drafts.engine.pool_moves
    own[1].context.reserve(600)
    assert drafts.engine.pool_moves > grown
    for _ in range(2):
        start(drafts, own, texts, [3, 3, 3])
        assert_as_alone(model, own, texts, [3, 3, 3])


@torch.no_grad()
def test_programs_that_read_other_weights_are_recorded_again() -> None:
    model, text = target_of("llama", dtype=torch.float64), texts_of(1)
    drafts = drafts_of(model)
    own = opened(drafts, text)
    start(drafts, own, text, [3])
    before = dict(drafts._programs)
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().flip(0).contiguous())
    own[0].context.begin(40, reuse=True)
    start(drafts, own, text, [3])
    assert_as_alone(model, own, text, [3])
    assert drafts._programs.keys() == before.keys()
    assert not {*drafts._programs.values()} & {*before.values()}


def answered(passes: Generator[Any, PassResult, Any], engine: PagedEngine) -> Any:
    """What a proposer returns when the engine runs the passes that it asks for."""
    try:
        segment = next(passes)
        while True:
            segment = passes.send(engine.run([segment])[0])
    except StopIteration as done:
        return done.value


def proposed_by_levels(place: str, sampled: bool, tokens: list[int] | None, size: int) -> list[Any]:
    """What a draft proposes at the root and two levels below it, one pass each; new text is read at the root."""
    model, text = target_of("llama").to(place), tokens_of(12).tolist()
    if tokens is not None:
        model.token_map = torch.tensor(tokens)
    noise = DraftNoise(KeyedNoise(3), 0.8, CHOICE) if sampled else None
    engine = PagedEngine(model, captured=True)
    draft = ModelProposer(engine.open(), DraftVocabulary(model, size), K, noise)
    draft.context.prefill(text[:9])
    draft.begin(text)
    graph = TokenGraph(text[-1], GraphConfig(mode="tree", theta_prob=0.0, theta_sib=0.0))
    said, frontier = [], [ROOT]
    for _ in range(3):
        said.append(answered(draft.propose(graph, frontier), engine))
        graph.extend(frontier, np.ones(len(frontier)), *said[-1], "draft")
        graph.close(frontier)
        frontier = graph.frontier(graph.unroll())[0][:5]
    return said


def same_proposals(some: list[Any], others: list[Any]) -> None:
    for (tokens, probs), (expected, values) in zip(some, others, strict=True):
        assert tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(probs, values, rtol=1e-3)


WRITTEN = np.random.default_rng(5).permutation(VOCAB)[:40].tolist()


@pytest.mark.parametrize("size", [VOCAB // 2, VOCAB, VOCAB + 9])
@pytest.mark.parametrize("tokens", [None, WRITTEN], ids=["all", "mapped"])
@pytest.mark.parametrize("sampled", [False, True])
@torch.no_grad()
def test_what_is_recorded_behind_a_pass_is_what_its_logits_say(
    sampled: bool, tokens: list[int] | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = proposed_by_levels("cpu", sampled, tokens, size)
    asked: list[int] = []
    monkeypatch.setattr(PassResult, "proposed", property(lambda self: asked.append(len(self.logits))))
    same_proposals(recorded, proposed_by_levels("cpu", sampled, tokens, size))
    assert asked == [3, 4, 5]
    assert all((children < size).all() for children, _ in recorded)


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
        for name in ("tokens", "parents", "depths"):
            assert getattr(at_once.graph, name).tolist() == getattr(level_by_level.graph, name).tolist(), name
        for name in ("states", "drafted", "sources", "max_depth"):
            assert getattr(at_once.graph, name) == getattr(level_by_level.graph, name), name


def test_without_memory_for_drafting_the_text_still_proposes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = target_of("llama")
    expected = GraphDecoder(model).generate(**ASKED, config=GraphConfig(mode="off")).sequences.tolist()
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    monkeypatch.setattr(device_draft, "Captured", refuse)
    for _ in range(2):
        found = decoder.generate(**ASKED, config=GraphConfig(cost=FlatCost()))
        assert found.sequences.tolist() == expected
        assert found.stats.accepted_by_source["draft"] == 0
    assert capsys.readouterr().err.count("going on without a draft model") == 1


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_draft_grows_the_same_nodes() -> None:
    text, grown = tokens_of(40).tolist(), []
    for place in ("cpu", "cuda"):
        drafts = drafts_of(target_of("llama").to(place), None)
        draft = drafts.open(drafts.engine.open(), NOBODY)
        draft.perturb = noise_of(1)
        draft.context.prefill(text[:8])
        for end in (20, 25, 40):
            start(drafts, [draft], [text[:end]], [5])
            grown.append(np.concatenate(list(draft.arriving())))
    for one, other in zip(grown[:3], grown[3:], strict=True):
        assert one[0, :K].tolist() == other[0, :K].tolist()
        np.testing.assert_allclose(one[0, K:-1], other[0, K:-1], rtol=1e-3, atol=1e-3)
        assert len({*one[:, -1]} & {*other[:, -1]}) > 0.8 * len({*one[:, -1]})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, WRITTEN], ids=["all", "mapped"])
@pytest.mark.parametrize("sampled", [False, True])
@torch.no_grad()
def test_a_captured_pass_proposes_the_same(sampled: bool, tokens: list[int] | None) -> None:
    same_proposals(*(proposed_by_levels(place, sampled, tokens, VOCAB) for place in ("cpu", "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 18])
@torch.no_grad()
def test_captured_programs_draft_the_same(count: int) -> None:
    texts, reports = texts_of(count), []
    for place in ("cpu", "cuda"):
        model = target_of("llama").to(place)
        drafts = drafts_of(model, 8192)
        own, levels = opened(drafts, [text[:4] for text in texts]), [5 - number % 3 for number in range(count)]
        for end in (4, 9, 60):  # recorded, replayed with other data, and at another width
            start(drafts, own, [text[:end] for text in texts], levels)
            reports.append([np.concatenate(list(draft.arriving())) for draft in own])
    for on_cpu, on_gpu in zip(reports[:3], reports[3:], strict=True):
        for one, other in zip(on_cpu, on_gpu, strict=True):
            assert one[0, :4].tolist() == other[0, :4].tolist()
            np.testing.assert_allclose(one[0, 4:8], other[0, 4:8], rtol=1e-3, atol=1e-3)
            assert len({*one[:, 8]} & {*other[:, 8]}) > 0.8 * len({*one[:, 8]})
