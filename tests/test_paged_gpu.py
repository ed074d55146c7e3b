"""Captured passes over many sequences on a CUDA device (pytest -m gpu), and their kernels in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import ALONE, PAGED, plain_story, scattered_context, story, tokens_of
from families import VOCAB, perturbed, target_of
from kernel_tools import strict_interpreter
from test_batch import alone, asked, check_left_behind, run, sequence_of
from torch import Tensor

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.batching import Batch
from draftgraph.cost.budget import FlatCost
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.protocol import Ranking, Segment
from draftgraph.engine.selfcheck import engine_for, inexactness


def story_by_kernels(name: str, captured: bool) -> list[Tensor]:
    """All kernels of a pass as on a GPU, where Triton interprets them."""
    from draftgraph.engine import paged
    from draftgraph.kernels import attention, fused

    def attend(*given: Any) -> Tensor:
        return attention.attend_triton(*given, splits=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_reference", attend)
        patch.setattr(fused, "compiles_for", lambda device: True)
        patch.setattr(paged, "program_of", lambda *given: None)
        patch.setattr(paged, "LEAST_READ", 8)  # the interpreter takes its time over each node
        patch.setattr(paged, "READING_WORDS", 1)
        model = target_of(name)
        return story(scattered_context(model, captured=captured), model)


# Two ranks on one GPU record nothing: gloo cannot be recorded.
@pytest.mark.parametrize(("name", "captured"), [("llama", True), ("gemma2", True), ("gpt_oss", True), ("llama", False)])
def test_a_pass_by_its_kernels_says_what_plain_passes_say(name: str, captured: bool) -> None:
    model = target_of(name)
    with strict_interpreter() as call:
        found = call(story_by_kernels, name, captured)
    for one, expected in zip(found, plain_story(model), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.gpu
def test_passes_that_are_not_recorded_say_what_plain_passes_say() -> None:
    model = target_of("llama").cuda()
    expected = plain_story(model)
    for one, plainly in zip(story(scattered_context(model, captured=False), model), expected, strict=True):
        torch.testing.assert_close(one, plainly, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PAGED, "gpt_oss"])
def test_captured_passes_say_what_plain_passes_say(name: str) -> None:
    model = target_of(name).cuda()
    expected = plain_story(model)
    for context in (scattered_context(model), PagedEngine(model).open()):
        assert context.engine.captured
        for one, two, plainly in zip(story(context, model), story(context, model), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0)
            torch.testing.assert_close(one, plainly, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("style", [{}, {"do_sample": True, "temperature": 0.9, "seed": 5, "top_k": 0}])
@pytest.mark.parametrize("name", PAGED)
def test_the_promise_holds_for_captured_passes(
    name: str, style: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(name).cuda()
    given: dict[str, Any] = {"input_ids": [tokens_of(9).tolist()], "max_new_tokens": 60} | style
    with monkeypatch.context() as patch:
        patch.setenv("DRAFTGRAPH_ENGINE", "eager")
        plain = GraphDecoder(model).generate(**given, config=GraphConfig(mode="off"))
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    assert all(isinstance(engine, PagedEngine) and engine.captured for engine in decoder.engines.all)
    for config in (GraphConfig(mode="off"), GraphConfig(cost=FlatCost()), GraphConfig(mode="graph", tau=1)):
        assert decoder.generate(**given, config=config).sequences.tolist() == plain.sequences.tolist(), config.mode


@pytest.mark.gpu
@torch.no_grad()
def test_a_pool_that_grows_gives_the_same_logits_on_cuda() -> None:
    """What was recorded wrote into the pool before."""
    model = target_of("llama").cuda()
    engine = PagedEngine(model)
    contexts = [engine.open() for _ in range(3)]
    with Loan(model):
        for number, context in enumerate(contexts):
            context.prefill(tokens_of(20 + 9 * number, number).tolist())
        found = []
        for _ in range(2):
            results = engine.run([Segment(context, np.array([7]), *ALONE) for context in contexts])
            found.append([result.logits.clone() for result in results])
            for context in contexts:
                context.forget(0)
            contexts[1].reserve(4 * engine.slots)
    assert engine.pool_moves >= 2
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [16384, 512])
@pytest.mark.parametrize("name", PAGED)
def test_everybody_gets_what_he_would_get_alone_on_cuda(name: str, slots: int) -> None:
    target = target_of(name).cuda()
    decoder = GraphDecoder(target, perturbed(target, 0.1))
    jobs = asked(24, seed=8)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = Batch(decoder, slots, sequences=20)
    assert all(isinstance(engine, PagedEngine) and engine.captured for engine in batch.engines.all)
    if (name, slots) == (PAGED[0], 16384):
        batch.prepare(GraphConfig())  # it takes its time, and what is missing is recorded as it is needed
    run(batch, sequences)
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
    check_left_behind(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_packed_and_captured(dtype: torch.dtype) -> None:
    for family in ("llama", "gemma3", "mixtral", "opt"):
        assert type(engine_for(target_of(family).to("cuda", dtype), 1024)) is PagedEngine


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_half_precision_in_order_has_the_bits_of_passes_over_one_node(family: str, dtype: torch.dtype) -> None:
    assert inexactness(target_of(family).to("cuda", dtype)) is None


@pytest.mark.gpu
@torch.no_grad()
def test_long_prompts_and_many_texts_on_cuda() -> None:
    model = target_of("mistral").cuda()
    engine, prompts = (
        PagedEngine(model, 2**17),
        [tokens_of(30 * number + 1, number).tolist() for number in range(70)],
    )
    with Loan(model):
        for _ in range(2):
            contexts = [engine.open() for _ in prompts]
            segments = [Segment.of_text(context, prompt) for context, prompt in zip(contexts, prompts, strict=True)]
            engine.run(segments)
            for segment in segments:
                segment.commit()
            results = engine.run([Segment(context, np.array([7]), *ALONE) for context in contexts])
            for context, result, prompt in zip(contexts, results, prompts, strict=True):
                expected = model(torch.tensor([[*prompt, 7]]).cuda()).logits[0, -1:]
                torch.testing.assert_close(result.logits, expected, rtol=1e-3, atol=1e-3)
                assert result.best(0) == Ranking.of(result.logits).tokens[0, 0]
                context.close()


@pytest.mark.gpu
def test_what_no_kernel_knows_runs_in_plain_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(engine_for(target_of("llama", dtype=torch.float64).cuda(), 1024)) is EagerEngine
    assert "no attention kernel for torch.float64" in capsys.readouterr().err


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
        together = [sequence_of(decoder, prompt, arguments, graphs, seed) for seed, prompt in enumerate(prompts)]
        run(Batch(decoder, 16384, sequences=40), together)
        texts.append([token for text in together for token in text.new_tokens])
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_passes_are_smaller_where_gpu_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those recorded after it are right."""
    from draftgraph.engine import paged
    from draftgraph.engine.capture import Captured

    class Short(Captured):
        def __init__(self, compute: Any, device: torch.device, *more: Any) -> None:
            super().__init__(compute, device, *more)
            if isinstance(self.output, tuple) and len(self.output[0]) > 32:
                raise torch.OutOfMemoryError

    model = target_of("llama").cuda()
    decoder = GraphDecoder(model, perturbed(model, 0.1))
    jobs = asked(20, seed=9)
    sequences = [sequence_of(decoder, *job) for job in jobs]
    batch = Batch(decoder, 16384, sequences=20)
    monkeypatch.setattr(paged, "Captured", Short)
    run(batch, sequences)
    assert isinstance(batch.engines.target, PagedEngine) and batch.engines.target.widest <= 32
    for sequence, (prompt, arguments, _, seed) in zip(sequences, jobs, strict=True):
        assert sequence.new_tokens == alone(decoder, prompt, arguments, seed)
