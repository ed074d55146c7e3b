"""What a check says of a model lasts, unless memory was short while it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import target_of

from draftgraph import GraphDecoder
from draftgraph.engine import paged, selfcheck
from draftgraph.engine.cache import PagedCache
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.selfcheck import engine_for


def failing(kind: Callable[..., Any], times: int, error: Exception) -> Callable[..., Any]:
    """An engine that cannot be made so many times."""
    left = [error] * times

    def made(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return kind(*given, **named)

    return made


SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")


def test_no_memory_for_a_cache_is_no_verdict_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(paged, "PagedCache", failing(PagedCache, 1, SHORT))
    model = target_of("llama")
    assert [type(engine_for(model)) for _ in range(2)] == [EagerEngine, PagedEngine]


def test_a_model_gets_its_static_engine_when_memory_is_there_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(selfcheck, "PagedEngine", failing(PagedEngine, 1, SHORT))
    model = target_of("llama")
    assert type(engine_for(model)) is EagerEngine
    assert "slower: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in capsys.readouterr().err
    decoder = GraphDecoder(model)
    assert type(decoder.engines.target) is PagedEngine and not capsys.readouterr().err


def test_a_model_gets_trees_when_memory_is_there_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "eager")
    monkeypatch.setattr(selfcheck, "EagerEngine", failing(EagerEngine, 2, SHORT))
    model = target_of("llama")
    assert not engine_for(model).branching
    assert "chains only, and slower: OutOfMemoryError" in capsys.readouterr().err
    assert engine_for(model).branching


def test_what_is_wrong_with_a_model_is_found_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(selfcheck, "PagedEngine", failing(PagedEngine, 1, RuntimeError("no such kernel")))
    model = target_of("llama")
    for _ in range(2):
        assert type(engine_for(model)) is EagerEngine
    assert capsys.readouterr().err.count("RuntimeError: no such kernel") == 1
