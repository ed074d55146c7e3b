"""Drafts of many texts that grow together: each proposes what a draft of its text alone proposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from test_static_engine import tokens_of

from draftgraph.choose import DraftNoise
from draftgraph.drafting import batch_program, device_batch
from draftgraph.drafting.batch_program import NEW_TOKENS
from draftgraph.drafting.device import DeviceDraft
from draftgraph.drafting.device_batch import BatchDraft, SeatDraft
from draftgraph.drafting.model import DraftVocabulary
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.static import StaticEngine
from draftgraph.noise import CHOICE, KeyedNoise

LENGTHS = [19, 5, 33, 16, 48]
NOISES = [None, (3, 0.8), (4, 1.2), None, (5, 0.3)]


@pytest.fixture(scope="module")
def model() -> Any:
    return target_of("llama", dtype=torch.float64)


def batch_of(model: Any, slots: int = 1024, levels: int = 5, k: int = 4) -> BatchDraft:
    return BatchDraft(PackedStaticEngine(model, slots), DraftVocabulary(model, VOCAB), k, levels)


def noise_of(number: int) -> DraftNoise | None:
    given = NOISES[number % len(NOISES)]
    return None if given is None else DraftNoise(KeyedNoise(given[0]), given[1], CHOICE)


def opened(batch: BatchDraft, texts: list[list[int]], ends: frozenset[int] = frozenset()) -> list[SeatDraft]:
    """Their texts have been read but for a few tokens."""
    drafts = []
    for number, text in enumerate(texts):
        drafts.append(batch.open(batch.engine.open(), ends))  # type: ignore[attr-defined]
        drafts[-1].perturb = noise_of(number)
        drafts[-1].catch_up(text[: len(text) - number])
    return drafts


def texts_of(count: int = len(LENGTHS)) -> list[list[int]]:
    return [tokens_of(LENGTHS[number % len(LENGTHS)], number).tolist() for number in range(count)]


def grown_alone(model: Any, text: list[int], levels: int, number: int, ends: frozenset[int] = frozenset()) -> Any:
    draft = DeviceDraft(StaticEngine(model), DraftVocabulary(model, VOCAB), 4)
    draft.begin_text(ends)
    draft.perturb, draft.levels = noise_of(number), levels
    draft.catch_up(text)
    draft.begin(text)
    return np.concatenate(list(draft.arriving()))


def start(batch: BatchDraft, drafts: list[SeatDraft], texts: list[list[int]], levels: list[int]) -> None:
    for draft, text, wish in zip(drafts, texts, levels, strict=True):
        draft.levels = wish
        draft.begin(text)
    batch.start(drafts)


def assert_as_alone(
    model: Any, drafts: list[SeatDraft], texts: list[list[int]], levels: list[int], ends: frozenset[int] = frozenset()
) -> None:
    for number, (draft, text, wish) in enumerate(zip(drafts, texts, levels, strict=True)):
        if not wish:
            assert not list(draft.arriving())
            continue
        found, expected = np.concatenate(list(draft.arriving())), grown_alone(model, text, wish, number, ends)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [1, 3, 5, 18])
@torch.no_grad()
def test_every_text_drafts_as_if_it_were_alone(model: Any, count: int) -> None:
    batch, texts = batch_of(model, 4096), texts_of(count)
    drafts, levels = opened(batch, texts), [5] * count
    start(batch, drafts, texts, levels)
    assert_as_alone(model, drafts, texts, levels)


@torch.no_grad()
def test_step_after_step_texts_grow_by_different_numbers_of_tokens(model: Any) -> None:
    batch, whole = batch_of(model), texts_of()
    drafts, ends = opened(batch, [text[:5] for text in whole]), [5, 5, 5, 5, 5]
    for step in range(4):
        texts = [text[:end] for text, end in zip(whole, ends, strict=True)]
        start(batch, drafts, texts, [3] * 5)
        assert_as_alone(model, drafts, texts, [3] * 5)
        assert [seat.engine.text for seat in drafts] == texts
        ends = [
            min(len(text), end + 1 + (number + step) % 5)
            for number, (text, end) in enumerate(zip(whole, ends, strict=True))
        ]


@pytest.mark.parametrize("wishes", [[5, 0, 1, 2, 4], [0, 0, 0, 1, 0], [0, 3, 3, 0, 0]], ids=str)
@torch.no_grad()
def test_texts_may_want_fewer_levels_than_others_or_none(model: Any, wishes: list[int]) -> None:
    batch, texts = batch_of(model), texts_of()
    drafts = opened(batch, texts)
    before = [list(draft.engine.text) for draft in drafts]
    start(batch, drafts, texts, wishes)
    assert_as_alone(model, drafts, texts, wishes)
    assert batch.fed[1:] == [8 * sum(wish > level for wish in wishes) for level in range(1, max(wishes))]
    for draft, text, wish, known in zip(drafts, texts, wishes, before, strict=True):
        assert draft.engine.text == (text if wish else known) and draft.passes == wish


@torch.no_grad()
def test_nobody_writes_into_another_text(model: Any) -> None:
    batch, texts = batch_of(model), texts_of()
    drafts = opened(batch, texts)
    engine: Any = batch.engine
    blocks = list(engine.cache.blocks.values())
    kept = [block.clone() for block in blocks]
    start(batch, drafts, texts, [0, 5, 2, 1, 0])
    may_change = {engine.slots}
    for draft, text in zip(drafts, texts, strict=True):
        places = range(len(text) - 1 - drafts.index(draft), len(draft.engine.pages) * PAGE)
        may_change |= {draft.engine.pages[place // PAGE] * PAGE + place % PAGE for place in places}
    others = [slot for slot in range(engine.cache.capacity) if slot not in may_change]
    for block, before in zip(blocks, kept, strict=True):
        assert torch.equal(block[:, :, others], before[:, :, others])


@torch.no_grad()
def test_who_has_paused_reads_what_he_missed(model: Any) -> None:
    batch, texts = batch_of(model), [tokens_of(70, number).tolist() for number in range(3)]
    drafts = opened(batch, [text[:10] for text in texts])
    for draft, wish in zip(drafts, (2, 0, 3), strict=True):
        draft.levels = wish
    ends = [12, 70, 10 + NEW_TOKENS]
    shown = [text[:end] for text, end in zip(texts, ends, strict=True)]
    start(batch, drafts, shown, [2, 3, 3])
    assert_as_alone(model, drafts, shown, [2, 3, 3])


@torch.no_grad()
def test_a_step_may_be_begun_again(model: Any) -> None:
    batch, texts = batch_of(model), texts_of(2)
    drafts = opened(batch, texts)
    for _ in range(2):
        start(batch, drafts, texts, [3, 3])
        assert_as_alone(model, drafts, texts, [3, 3])


@torch.no_grad()
def test_nothing_is_drafted_behind_an_end(model: Any) -> None:
    texts = texts_of(3)
    ends = frozenset(int(grown_alone(model, text, 1, number)[0, 0]) for number, text in enumerate(texts))
    batch = batch_of(model)
    drafts = opened(batch, texts, ends)
    start(batch, drafts, texts, [4, 4, 4])
    assert_as_alone(model, drafts, texts, [4, 4, 4], ends)


@torch.no_grad()
def test_without_room_for_its_nodes_a_text_does_not_draft(model: Any) -> None:
    batch, texts = batch_of(model, slots=96), [tokens_of(30).tolist(), tokens_of(30, 1).tolist()]
    drafts = opened(batch, texts)
    start(batch, drafts, texts, [5, 5])
    assert [draft.levels for draft in drafts] == [5, 0] and not list(drafts[1].arriving())
    assert_as_alone(model, drafts[:1], texts[:1], [5])


@torch.no_grad()
def test_without_memory_nobody_drafts(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(batch_program, "Captured", refuse)
    batch, texts = batch_of(model), texts_of(2)
    drafts = opened(batch, texts)
    for _ in range(2):
        start(batch, drafts, texts, [3, 3])
        assert [draft.levels for draft in drafts] == [0, 0] and not list(drafts[0].arriving())
    assert capsys.readouterr().err.count("going on without a draft model") == 1


@torch.no_grad()
def test_tables_grow_with_the_texts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "PAGES", 8)
    batch, texts = batch_of(model), [tokens_of(length).tolist() for length in (9, 180)]
    drafts = opened(batch, texts)
    for shown in ([text[:9] for text in texts], texts):
        for draft, text in zip(drafts, shown, strict=True):
            draft.engine.rewind(0)
            draft.catch_up(text)
        start(batch, drafts, shown, [3, 3])
        assert_as_alone(model, drafts, shown, [3, 3])
    assert batch.pages >= 180 // PAGE


@torch.no_grad()
def test_levels_before_the_last_arrive_early(model: Any) -> None:
    batch, texts = batch_of(model), texts_of(3)
    drafts = opened(batch, texts)
    start(batch, drafts, texts, [5, 4, 1])
    parts = [[len(part) for part in draft.arriving()] for draft in drafts]
    assert parts == [[25, 8], [25], [1]]


@torch.no_grad()
def test_more_texts_than_any_program_holds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "TEXTS", (1, 2))
    batch, texts = batch_of(model), texts_of(3)
    drafts = opened(batch, texts)
    start(batch, drafts, texts, [2, 2, 2])
    assert_as_alone(model, drafts, texts, [2, 2, 0])


@pytest.mark.parametrize("family", ["gemma2", "qwen2_window", "gpt2"])
@torch.no_grad()
def test_other_families(family: str) -> None:
    model = perturbed(target_of(family, dtype=torch.float64), 0.1)
    batch, texts = batch_of(model), texts_of(4)
    drafts = opened(batch, texts)
    start(batch, drafts, texts, [4, 2, 0, 4])
    assert_as_alone(model, drafts, texts, [4, 2, 0, 4])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 18])
@torch.no_grad()
def test_captured_programs_draft_the_same(count: int) -> None:
    texts, reports = texts_of(count), []
    for place in ("cpu", "cuda"):
        model = target_of("llama").to(place)
        batch = batch_of(model, 8192)
        drafts, levels = opened(batch, [text[:4] for text in texts]), [5 - number % 3 for number in range(count)]
        for end in (4, 9, 60):  # recorded, replayed with other data, and at another width
            start(batch, drafts, [text[:end] for text in texts], levels)
            reports.append([np.concatenate(list(draft.arriving())) for draft in drafts])
    for on_cpu, on_gpu in zip(reports[:3], reports[3:], strict=True):
        for one, other in zip(on_cpu, on_gpu, strict=True):
            assert one[0, :4].tolist() == other[0, :4].tolist()
            np.testing.assert_allclose(one[0, 4:8], other[0, 4:8], rtol=1e-3, atol=1e-3)
            assert len({*one[:, 8]} & {*other[:, 8]}) > 0.8 * len({*one[:, 8]})
