"""Heads that grow their trees on their device: what they say there is what they say alone, in the trees of the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from test_head_proposers import HEADS, NEW_TOKENS, SAMPLED, VOCABULARY, head, states_of, target

from draftgraph import GraphConfig, GraphDecoder, step
from draftgraph.batching.batch import Batch
from draftgraph.choose import DraftNoise
from draftgraph.cost import FlatCost
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import Segment
from draftgraph.generation import prepare
from draftgraph.graph import TokenGraph
from draftgraph.models.heads.block import new_block_head
from draftgraph.noise import CHOICE, KeyedNoise
from draftgraph.proposers import device_draft
from draftgraph.proposers.device_draft import WIDTH, DeviceDraft
from draftgraph.proposers.device_heads import HeadDraft, kind_for
from draftgraph.proposers.draft_model import DraftVocabulary
from draftgraph.proposers.growth import grow_together, growing
from draftgraph.proposers.heads import UnreadStates, head_proposer
from draftgraph.sequence import Sequence

K, LEVELS, EXPANSIONS = 4, 4, 20
FREE, DEAR = GraphConfig(cost=FlatCost()), GraphConfig(cost=FlatCost(draft=100.0))
NOBODY: frozenset[int] = frozenset()
NOISE = DraftNoise(KeyedNoise(3), 0.8, CHOICE)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCABULARY, length).tolist()  # type: ignore[no-any-return]


def said(draft: Any, text: list[int], path: list[int]) -> Any:
    """Logits of all tokens behind a path from the end of a text, computed from nothing."""
    rows = draft.project(states_of(text, draft.reads))[:-1]
    if draft.kind == "block":
        known, size = len(rows), draft.block_size
        seen = torch.ones(known + size, known + size).tril().bool()
        if not draft.causal:
            seen[known:] = True
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        tokens = torch.tensor([[*text, *[draft.mask_token_id] * (size - 1)]])
        states = torch.cat([rows, rows.new_zeros(size, rows.shape[1])])[None]
        out = draft(tokens, states=states, attention_mask={"full_attention": mask}, use_cache=False)
        logits = out.logits[0, known + 1 + len(path)]
    else:
        for place in range(len(path) + 1):
            out = draft(torch.tensor([text[1:] + path[:place]]), states=rows[None], use_cache=False)
            rows = torch.cat([rows, out.states[0, -1:]])
        logits = out.logits[0, -1]
    written = getattr(draft, "token_map", torch.arange(VOCABULARY))
    return torch.full((VOCABULARY,), -torch.inf).index_copy_(0, written, logits[: len(written)])


@dataclass
class Pair:
    """A target and a head in engines whose passes are recorded, and the head's drafts there."""

    head: Any
    device: str = "cpu"
    levels: int = LEVELS
    width: int | None = None
    drafts: Any = field(init=False)

    def __post_init__(self) -> None:
        self.target = PagedEngine(copy.deepcopy(target()).to(self.device), 4096, captured=True)
        self.target.read_states(self.head.reads)
        self.engine = PagedEngine(copy.deepcopy(self.head).to(self.device), 4096, captured=True)
        kind, width = kind_for(self.head), EXPANSIONS if self.head.kind == "block" else WIDTH
        assert kind is not None
        told = DraftVocabulary(self.head, VOCABULARY), K, self.levels, self.width or width, self.target.left
        self.drafts = kind(self.engine, *told)  # type: ignore[arg-type]

    def open(self, text: list[int], read: int | None = None, ends: frozenset[int] = NOBODY) -> HeadDraft:
        """The target has read the text, and the head the first tokens of it: all but the last few, if not told."""
        draft: HeadDraft = self.drafts.open(self.engine.open(), ends)
        self.feed(draft, text)
        draft.prefill(text[: len(text) - 2 if read is None else read], None)
        return draft

    def feed(self, draft: Any, text: list[int]) -> None:
        context = self.target.open()
        context.on_states = lambda states: draft.note(len(context.text) - len(states), states)
        context.prefill(text[:-1])
        context.close()

    def start(self, drafts: list[HeadDraft], texts: list[list[int]], levels: list[int], room: int = 1 << 30) -> None:
        for draft, text, wish in zip(drafts, texts, levels, strict=True):
            draft.levels = wish
            draft.begin(text)
        self.drafts.launch(drafts, room)


def report_of(draft: DeviceDraft) -> Any:
    parts = list(draft.arriving())
    return np.concatenate(parts) if parts else None


def grown_alone(draft: Any, text: list[int], levels: int = LEVELS, noise: DraftNoise | None = None) -> Any:
    pair = Pair(draft)
    own = pair.open(text)
    own.perturb = noise
    pair.start([own], [text], [levels])
    return report_of(own)


def paths_of(report: Any) -> dict[int, tuple[list[int], float]]:
    """The path of every node that is named, and its score, by number."""
    paths: dict[int, tuple[list[int], float]] = {-1: ([], 1.0)}
    for row, node in enumerate(report[:, -1].astype(int).tolist()):
        if row and node < 0:
            continue
        path, score = paths[node]
        for rank in range(K):
            child = [*path, int(report[row, rank])], score * float(np.exp(report[row, K + rank]))
            paths[row * K + rank] = child
    return paths


@cache
def sure_head(kind: str) -> Any:
    """So sure of its best tokens that trees become deep."""
    found = copy.deepcopy(head(kind))
    found.lm_head.weight.data *= 8
    return found


@pytest.fixture(params=HEADS)
def draft(request: Any) -> Any:
    return sure_head(request.param)


@pytest.mark.parametrize("noise", [None, NOISE], ids=["greedy", "sampled"])
def test_what_it_says_at_every_node_is_what_it_says_alone(draft: Any, noise: DraftNoise | None) -> None:
    text = text_of(19)
    report = grown_alone(draft, text, noise=noise)
    paths, deepest = paths_of(report), 0
    for row, node in enumerate(report[:, -1].astype(int).tolist()):
        if row and node < 0:
            continue
        path, _ = paths[node]
        deepest = max(deepest, len(path))
        logits = said(draft, text, path)
        if noise is not None:
            logits = noise(logits[None], np.array([len(text) + len(path)]))[0]
        best = torch.topk(torch.softmax(logits, dim=-1), K)
        assert report[row, :K].astype(int).tolist() == best.indices.tolist()
        np.testing.assert_allclose(np.exp(report[row, K:-1]), best.values.numpy(), rtol=1e-3)
    assert deepest == LEVELS - 1


class Width:
    """A budget that wants the best few open nodes, always."""

    def worth_drafting(self, tree: Any, scores: Any) -> int:
        return min(WIDTH, len(scores))


def test_the_tree_is_that_of_the_host(draft: Any) -> None:
    """Levels of the same width, or as many nodes as are wanted of a block: the same nodes with the same chances."""
    text = text_of(23, 1)
    pair, ends = Pair(draft), frozenset({int(grown_alone(draft, text, 1)[0, 1])})
    own = pair.open(text, ends=ends)
    pair.start([own], [text], [LEVELS])
    on_device = paths_of(report_of(own))
    assert not any(path[place] in ends for path, _ in on_device.values() for place in range(len(path) - 1))

    is_block = draft.kind == "block"
    nodes = EXPANSIONS + 1 if is_block else 4096
    rules: dict[str, Any] = {"theta_prob": 0.0, "theta_sib": 0.0, "growth": "best-first"}
    config = GraphConfig(mode="tree", k=K, max_nodes=nodes, max_depth=LEVELS, **rules)
    proposer = head_proposer(PagedEngine(draft, captured=True).open(), DraftVocabulary(draft, VOCABULARY), K)
    pair.feed(proposer, text)
    proposer.begin(text)
    graph = TokenGraph(text[-1], config, LEVELS, ends)
    budget: Any = None if is_block else Width()
    (tree,) = grow_together([growing(graph, [proposer], budget=budget)], proposer.context.engine.run)
    on_host: list[tuple[list[int], float]] = []
    for place, parent in enumerate(tree.parents.tolist()):
        path = [] if parent < 0 else [*on_host[parent][0], int(tree.tokens[place])]
        on_host.append((path, float(tree.scores[place])))
    best = sorted(on_device.values(), key=lambda one: -one[1])[: len(tree)]
    assert len(tree) == (nodes if is_block else len(on_device)) and tree.depths.max() == LEVELS
    assert sorted(path for path, _ in best) == sorted(path for path, _ in on_host)
    np.testing.assert_allclose([score for _, score in best], sorted(tree.scores, reverse=True), rtol=1e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_the_host_adds_the_noise_of_the_next_position(draft: Any, captured: bool) -> None:
    text = text_of(23, 1)
    config = GraphConfig(mode="tree", k=2, max_nodes=12, max_depth=3, theta_prob=0.0, theta_sib=0.0)
    proposer = head_proposer(PagedEngine(draft, captured=captured).open(), DraftVocabulary(draft, VOCABULARY), 2)
    Pair(draft).feed(proposer, text)
    proposer.perturb = NOISE
    proposer.begin(text)
    (tree,) = grow_together([growing(TokenGraph(text[-1], config, 3, NOBODY), [proposer])], proposer.context.engine.run)
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([] if parent < 0 else [*paths[parent], token])
    assert tree.depths.max() > 1
    for node in {*tree.parents[1:].tolist()}:
        noisy = NOISE(said(draft, text, paths[node])[None], np.array([len(text) + len(paths[node])]))[0]
        below = [paths[child][-1] for child in np.flatnonzero(tree.parents == node)]
        assert {*below} <= {*torch.topk(noisy, 2).indices.tolist()}


def test_texts_of_all_lengths_draft_side_by_side_as_alone(draft: Any) -> None:
    texts, levels = [text_of(length, length) for length in (19, 2, 33, 16, 48)], [LEVELS, 2, 0, 1, LEVELS]
    pair = Pair(draft)
    own = [pair.open(text, max(1, len(text) - number)) for number, text in enumerate(texts)]
    pair.start(own, texts, levels)
    for one, text, wish in zip(own, texts, levels, strict=True):
        found = report_of(one)
        if not wish:
            assert found is None
        else:
            expected = grown_alone(draft, text, wish)
            same = found[:, -1] == expected[:, -1]
            assert same.all()
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert [one.passes for one in own] == [min(wish, 1) if draft.kind == "block" else wish for wish in levels]


def test_a_text_that_paused_goes_on_with_states_of_several_passes(draft: Any) -> None:
    """Some of them wait since passes of long ago, the last ones lie where the target has left them."""
    text = text_of(40, 3)
    pair = Pair(draft)
    own = pair.open(text[:10])
    context = pair.target.open()
    context.prefill(text[:9])
    for first, last, wish in ((9, 12, 0), (12, 13, 0), (13, 18, 2), (18, 21, 0), (21, 26, LEVELS)):
        tree = [text[first], *text_of(3, first), *text[first + 1 : last]]
        segment = chain_behind_others(context, tree, last - first)
        (result,) = pair.target.run([segment])
        path = [0, *range(4, len(tree))]
        context.commit(path, text[first:last])
        own.note(first, result.states, path)
        shown = text[: last + 1]
        pair.start([own], [shown], [wish])
        if wish:
            np.testing.assert_allclose(report_of(own), grown_alone(draft, shown, wish), rtol=1e-4, atol=1e-4)


def chain_behind_others(context: Any, tokens: list[int], count: int) -> Segment:
    """A root with three children that are wrong, and a chain of `count` that is right."""
    depths, visible = np.zeros(len(tokens), dtype=np.int64), np.eye(len(tokens), dtype=bool)
    visible[:, 0] = True
    depths[1:4] = 1
    for place in range(4, len(tokens)):
        depths[place] = place - 3
        visible[place, 4:place] = True
    assert len(tokens) == count + 3
    return Segment(context, np.array(tokens), depths, visible)


def test_what_was_missed_is_read_in_pieces(draft: Any) -> None:
    text, going = text_of(150, 5), []
    pair = Pair(draft)
    own = pair.open(text, 3)
    for _ in range(4):
        pair.start([own], [text], [2], room=50)
        going.append(own.levels)
    assert going == [0, 0, 2, 2] if draft.kind == "block" else [0, 0, 2, 0]
    pair.start([own], [text], [2])
    other = pair.open(text, 3)
    pair.start([other], [text], [2])
    np.testing.assert_allclose(report_of(other), grown_alone(draft, text, 2), rtol=1e-4, atol=1e-4)


def test_states_that_were_read_keep_no_memory(draft: Any) -> None:
    text = text_of(150, 5)
    own = Pair(draft).open(text, 145)
    own.begin(text)
    rows = own.unread_states._rows
    assert 0 < len(rows) < 7 and rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


def test_without_states_it_rests(draft: Any) -> None:
    pair, text = Pair(draft), text_of(12)
    own: HeadDraft = pair.drafts.open(pair.engine.open(), NOBODY)
    pair.start([own], [text], [3])
    assert own.levels == 0 and not list(own.arriving())


def test_a_block_without_a_bit_for_each_node_is_asked_by_the_host() -> None:
    assert kind_for(new_block_head(target(), 33, 3, reads=[1])) is not None
    assert kind_for(new_block_head(target(), 34, 3, reads=[1])) is None


@cache
def plainly(prompt: tuple[int, ...], **arguments: Any) -> list[int]:
    """The text of plain decoding."""
    decoder = GraphDecoder(target(), config=GraphConfig(mode="off"))
    return decoder.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **arguments).sequences[0].tolist()


class TestDecoding:
    @pytest.fixture(autouse=True)
    def static(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")

    def batch(self, draft: Any, config: GraphConfig = FREE) -> Batch:
        return Batch(GraphDecoder(target(), draft, config=config), slots=4096)

    def sequences(self, batch: Batch, count: int, length: int = 9, **arguments: Any) -> list[Sequence]:
        found = []
        for number in range(count):
            ids = torch.tensor([text_of(length + number, number)])
            request = prepare(target(), ids, None, max_new_tokens=NEW_TOKENS, **arguments)
            found.append(Sequence(request, 4, batch.decoder.config))
            batch.add(found[-1])
        return found

    @pytest.mark.parametrize("mode", ["auto", "chain"])
    @pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("count", [1, 5])
    def test_tokens_are_those_of_plain_decoding(self, draft: Any, count: int, arguments: dict, mode: str) -> None:
        batch = self.batch(draft, GraphConfig(mode=mode, cost=FlatCost()))
        given = {name: value for name, value in arguments.items() if name != "seed"}
        texts = self.sequences(batch, count, **given)
        while batch.busy:
            batch.step()
        for one in texts:
            assert one.failure is None and isinstance(one.draft, HeadDraft) and one.stats.draft_passes > 0
            assert one.text == plainly(tuple(one.text[: one.prompt_length]), **arguments)

    def test_every_step_drafts_from_the_states_of_the_accepted_path(
        self, draft: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose places in the target's pass have gaps: at the root it says what it says behind the text."""
        seen, steps, arriving = [], [], DeviceDraft.arriving

        def watched(own: Any) -> Iterator[Any]:
            parts = list(arriving(own))
            if parts:
                seen.append((list(own._text), parts[0][0].copy()))
            return iter(parts)

        monkeypatch.setattr(DeviceDraft, "arriving", watched)
        batch = self.batch(draft)
        batch.decoder.observer = steps.append
        self.sequences(batch, 3)
        while batch.busy:
            batch.step()
        assert any(step.path and step.path != list(range(1, 1 + len(step.path))) for step in steps)
        assert len(seen) >= len(steps) > 12
        for text, root in seen:
            best = torch.topk(torch.softmax(said(draft, text, []), dim=-1), K)
            assert root[:K].astype(int).tolist() == best.indices.tolist()
            np.testing.assert_allclose(np.exp(root[FREE.k : FREE.k + K]), best.values.numpy(), rtol=1e-3)

    def test_a_step_that_is_begun_again_leaves_the_next_as_they_were(self, draft: Any) -> None:
        batch = self.batch(draft)
        (one,) = self.sequences(batch, 1)
        while len(one.new_tokens) < 3:
            batch.step()
        one.restart()
        batch.engines.launch_drafts([one])
        assert one.draft.levels == (0 if draft.kind == "states" else 4)
        passes = one.draft.passes
        while batch.busy:
            batch.step()
        assert one.failure is None and one.draft.passes > passes
        assert one.text == plainly(tuple(one.text[: one.prompt_length]))

    def test_without_memory_nobody_drafts(
        self, draft: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*_: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(device_draft, "Captured", refuse)
        batch = self.batch(draft)
        texts = self.sequences(batch, 2)
        while batch.busy:
            batch.step()
        assert not any(one.failure or one.stats.accepted_by_source["draft"] for one in texts)
        assert all(one.draft.unread_states.end == 0 for one in texts)  # none that nobody will read
        assert capsys.readouterr().err.count("going on without a draft model") == 1

    def test_memory_that_is_short_for_states_costs_no_token(self, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is drafted on, so that the states of every step are put aside when it has been taken."""
        take_in, taken = UnreadStates.take_in, []

        def refuse(*given: Any) -> None:
            taken.append(None)
            if len(taken) == 9:
                raise torch.OutOfMemoryError
            take_in(*given)

        monkeypatch.setattr(UnreadStates, "take_in", refuse)
        batch = self.batch(draft, DEAR)
        texts = self.sequences(batch, 3)
        told: dict[Sequence, list[int]] = {one: [] for one in texts}
        while batch.busy:
            for one, taken_step in batch.step().steps:
                assert taken_step is not None
                told[one] += taken_step.tokens
        assert [one.new_tokens for one in texts] == list(told.values())
        assert sum(one.draft.unread_states.end == 0 for one in texts) == 1  # what came later is not kept either

    def test_states_that_are_not_drafted_on_do_not_pile_up(self, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step, "WAITING", 6)
        batch = self.batch(draft, DEAR)
        texts = self.sequences(batch, 2)
        while batch.busy:
            batch.step()
            for one in texts:
                states = one.draft.unread_states
                assert states.end - states.start <= 7
        for one in texts:
            assert one.stats.draft_passes == 0 and len(one.draft.unread_states._rows) < 8
            assert one.text == plainly(tuple(one.text[: one.prompt_length]))

    @pytest.mark.parametrize("kind", ["states", "block"])
    def test_a_batch_is_prepared_for_what_it_needs(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = Batch(GraphDecoder(target(), sure_head(kind), config=FREE), slots=4096, sequences=2)
        batch.prepare(FREE)
        drafts = batch.engines.device_drafts(FREE)
        assert drafts is not None
        known = {key: dict(program._readings) for key, program in drafts._programs.items()}
        self.sequences(batch, 2)
        while batch.busy:
            batch.step()
        assert known == {key: program._readings for key, program in drafts._programs.items()}


@pytest.mark.gpu
def test_a_captured_head_grows_the_same_nodes(draft: Any) -> None:
    texts, reports = [text_of(length, length) for length in (19, 33, 48)], []
    for place in ("cpu", "cuda"):
        pair = Pair(draft, place)
        own = [pair.open(text[:12]) for text in texts]
        context = [pair.target.open() for _ in texts]
        for one, text in zip(context, texts, strict=True):
            one.prefill(text[:11])
        for first, last in ((11, 14), (14, 18)):
            trees = [[text[first], *text_of(3, first), *text[first + 1 : last]] for text in texts]
            segments = [chain_behind_others(one, tree, last - first) for one, tree in zip(context, trees, strict=True)]
            path = [0, *range(4, 3 + last - first)]
            for one, text, draft_of, result in zip(context, texts, own, pair.target.run(segments), strict=True):
                one.commit(path, text[first:last])
                draft_of.note(first, result.states, path)
            pair.start(own, [text[: last + 1] for text in texts], [LEVELS, 2, LEVELS])
            reports.append([report_of(one) for one in own])
    for on_cpu, on_gpu in zip(reports[:2], reports[2:], strict=True):
        for one, other in zip(on_cpu, on_gpu, strict=True):
            assert one[0, :K].tolist() == other[0, :K].tolist()
            np.testing.assert_allclose(one[0, K:-1], other[0, K:-1], rtol=1e-3, atol=1e-3)
            assert len({*one[:, -1]} & {*other[:, -1]}) > 0.8 * len({*one[:, -1]})
