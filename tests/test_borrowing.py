"""One model used by several threads, each with a decoder of its own: all is put back, and every pass finds its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event
from typing import Any

import pytest
import torch
from families import target_of
from torch import nn

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.engine.borrowing import Fusions, Linears, Loan

SOON = 0.2  # seconds that another thread is given to come in between


def state_of(model: nn.Module) -> list[Any]:
    """All that a pass may change."""
    modeling = sys.modules[type(model).__module__]
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    attention = [config._attn_implementation for config in configs.values()]
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [*attention, *forwards, modeling.apply_rotary_pos_emb, *(module.training for module in model.modules())]


def large_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))


def overlap(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> None:
    """One thread enters, another wants to, the first leaves, then the other: as passes of two decoders may fall."""
    inside, leave, left = Event(), Event(), Event()

    def stay(one: AbstractContextManager[Any]) -> None:
        with one:
            inside.set()
            leave.wait(SOON)
        left.set()

    def come_later(other: AbstractContextManager[Any]) -> None:
        assert inside.wait(10)
        with other:
            leave.set()
            assert left.wait(10)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(stay, first), pool.submit(come_later, second)]:
            future.result(20)


def test_linear_layers_are_given_back_when_passes_overlap() -> None:
    layers = large_layers()
    overlap(Linears(layers).borrowed(), Linears(layers).borrowed())
    assert not any("forward" in vars(module) for module in layers.modules())


def test_fused_modules_are_given_back_when_passes_overlap() -> None:
    model = target_of("llama")
    before = state_of(model)
    overlap(*(Fusions(model, kinds=("cpu",)).borrowed() for _ in range(2)))
    assert state_of(model) == before


def test_a_modeling_file_stays_borrowed_until_its_last_user_leaves() -> None:
    models = [target_of("llama"), target_of("llama")]
    before = [state_of(model) for model in models]
    rotary = sys.modules[type(models[0]).__module__]
    own = rotary.apply_rotary_pos_emb
    first, second = (Fusions(model, kinds=("cpu",)).borrowed() for model in models)
    with first:
        second.__enter__()
    assert rotary.apply_rotary_pos_emb is not own
    second.__exit__(None, None, None)
    assert [state_of(model) for model in models] == before


def test_what_is_found_in_a_model_does_not_depend_on_other_threads() -> None:
    model, layers = target_of("llama"), large_layers()

    def found() -> list[int]:
        return [len(Fusions(model, kinds=("cpu",))._forwards), len(Linears(layers)._forwards)]

    expected = found()
    with ThreadPoolExecutor(1) as pool:
        with Fusions(model, kinds=("cpu",)).borrowed(), Linears(layers).borrowed():
            waiting = pool.submit(found)
            Event().wait(SOON)
        assert waiting.result(20) == expected


@pytest.fixture
def training() -> Iterator[nn.Module]:
    """A model in training mode with an attention that takes no masks."""
    model = target_of("llama").train()
    model.config._attn_implementation_internal = "flex_attention"
    yield model


@pytest.mark.parametrize("late", [False, True], ids=["made before", "made while the other is on"])
def test_loans_that_overlap_end_with_the_last(training: nn.Module, late: bool) -> None:
    before = state_of(training)
    first, second = Loan(training), Loan(training)
    with ThreadPoolExecutor(1) as another:
        with first:
            second = Loan(training) if late else second
            another.submit(second.__enter__).result(10)
            on_loan = state_of(training)
        assert state_of(training) == on_loan != before
        another.submit(second.__exit__, None, None, None).result(10)
    assert state_of(training) == before
    with second:
        assert state_of(training) == on_loan
    assert state_of(training) == before


@pytest.mark.parametrize("engines", [("static", "static"), ("static", "eager"), ("eager", "eager")], ids=str)
def test_two_threads_decode_with_one_model(engines: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = target_of("llama"), target_of("llama", seed=1)
    before = state_of(model)

    def decoder_of(engine: str) -> GraphDecoder:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
        return GraphDecoder(model, draft, config=GraphConfig(mode="graph"))

    decoders = [decoder_of(engine) for engine in engines]
    prompts = [torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[2, 7, 1, 8]])]

    def decoded(decoder: GraphDecoder, prompt: torch.Tensor) -> list[list[int]]:
        return [decoder.generate(prompt, max_new_tokens=12, do_sample=False).sequences.tolist() for _ in range(4)]

    expected = [decoded(decoder, prompt) for decoder, prompt in zip(decoders, prompts, strict=True)]
    often: Callable[[float], None] = sys.setswitchinterval
    usual = sys.getswitchinterval()
    often(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(decoded, decoders, prompts))
    finally:
        often(usual)
    assert found == expected
    assert state_of(model) == before
