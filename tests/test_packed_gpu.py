"""Captured passes over many texts on a CUDA device (pytest -m gpu), and all their kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB, perturbed, target_of
from kernel_tools import strict_interpreter
from test_batch import alone, asked, check_left_behind, run, text_of
from test_packed_static import ROOT, seat_of
from test_static_engine import STATIC, story, tokens_of
from torch import Tensor

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.batching.seats import packed_or_apart
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.packed import PackedEngine, Part
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.engine.runner import EagerEngine
from draftgraph.ranking import Ranking


def story_by_kernels(name: str) -> list[Tensor]:
    """All kernels of a pass as on a GPU, where Triton interprets them."""
    from draftgraph.engine import packed_graph, packed_kernel, packed_static
    from draftgraph.kernels import fused

    def attend(*given: Any) -> Tensor:
        return packed_kernel.attend(*given, splits=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_graph, "reference", attend)
        patch.setattr(fused, "compiles_for", lambda device: True)
        patch.setattr(packed_static, "LEAST_READ", 8)  # the interpreter takes its time over each node
        patch.setattr(packed_static, "READING_WORDS", 1)
        model = target_of(name)
        return story(seat_of(model), model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_pass_by_its_kernels_says_what_plain_passes_say(name: str) -> None:
    model = target_of(name)
    with strict_interpreter() as call:
        found = call(story_by_kernels, name)
    for one, expected in zip(found, story(EagerEngine(model), model), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*STATIC, "gpt_oss"])
def test_captured_passes_say_what_plain_passes_say(name: str) -> None:
    model = target_of(name).cuda()
    seat = seat_of(model)
    found, expected = story(seat, model), story(EagerEngine(model), model)
    again = story(seat, model)
    for one, two, plainly in zip(found, again, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
        torch.testing.assert_close(one, plainly, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [16384, 512])
@pytest.mark.parametrize("name", STATIC)
def test_everybody_gets_what_he_would_get_alone_on_cuda(name: str, slots: int) -> None:
    target = target_of(name).cuda()
    decoder = GraphDecoder(target, perturbed(target, 0.1))
    jobs = asked(24, seed=8)
    texts = [text_of(decoder, *job) for job in jobs]
    batch = Batch(decoder, slots, texts=20)
    assert isinstance(batch.target, PackedStaticEngine) and isinstance(batch.draft, PackedStaticEngine)
    if (name, slots) == (STATIC[0], 16384):
        batch.prepare(GraphConfig())  # it takes its time, and what is missing is recorded as it is needed
    run(batch, texts)
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_packed_and_captured(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma3", "mixtral", "opt"):
        assert type(packed_or_apart(target_of(family).to("cuda", dtype), 1024, 2)) is PackedStaticEngine


@pytest.mark.gpu
@torch.no_grad()
def test_long_prompts_and_many_texts_on_cuda() -> None:
    model = target_of("mistral").cuda()
    engine, prompts = (
        PackedStaticEngine(model, 2**17),
        [tokens_of(30 * number + 1, number).tolist() for number in range(70)],
    )
    with Loan(model):
        for _ in range(2):
            seats = [engine.open() for _ in prompts]
            parts = [Part.of_text(seat, prompt) for seat, prompt in zip(seats, prompts, strict=True)]
            engine.run(parts)
            for part in parts:
                part.commit()
            found = engine.run([Part(seat, np.array([7]), *ROOT) for seat in seats])
            for seat, logits, prompt in zip(seats, found, prompts, strict=True):
                expected = model(torch.tensor([[*prompt, 7]]).cuda()).logits[0, -1:]
                torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
                assert seat.rank(logits).tokens[0, 0] == Ranking.of(logits).tokens[0, 0]
                seat.close()


@pytest.mark.gpu
def test_what_no_kernel_knows_is_packed_without_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(packed_or_apart(target_of("llama", dtype=torch.float64).cuda(), 1024, 2)) is PackedEngine
    assert "no packed kernel for torch.float64" in capsys.readouterr().err


@pytest.mark.gpu
@torch.no_grad()
def test_moves_and_samples_of_many_texts_on_cuda() -> None:
    """Trees and sampled tokens of 40 texts, step by step, as on a CPU."""
    target = target_of("qwen3")
    texts: list[list[int]] = []
    for device in ("cpu", "cuda"):
        model = target.to(device)
        decoder = GraphDecoder(model)
        arguments = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95}
        prompts = [[number % VOCAB, *[3, 4, 5] * (number % 9)] for number in range(40)]
        graphs = GraphConfig(mode="auto", cost="flat")
        together = [text_of(decoder, prompt, arguments, graphs, seed) for seed, prompt in enumerate(prompts)]
        run(Batch(decoder, 16384, texts=40), together)
        texts.append([token for text in together for token in text.going.new_tokens])
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_passes_are_smaller_where_gpu_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those recorded after it are right."""
    from draftgraph.engine import packed_static
    from draftgraph.engine.capture import Captured

    class Short(Captured):
        def __init__(self, compute: Any, device: torch.device, pool: Any = None) -> None:
            super().__init__(compute, device, pool)
            if self.output is not None and len(self.output) > 32:
                raise torch.OutOfMemoryError

    model = target_of("llama").cuda()
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    jobs = asked(20, seed=9)
    texts = [text_of(decoder, *job) for job in jobs]
    batch = Batch(decoder, 16384, texts=20)
    monkeypatch.setattr(packed_static, "Captured", Short)
    run(batch, texts)
    assert isinstance(batch.target, PackedStaticEngine) and batch.target.widest <= 32
    for text, (prompt, arguments, _, seed) in zip(texts, jobs, strict=True):
        assert text.going.new_tokens == alone(decoder, prompt, arguments, seed)
