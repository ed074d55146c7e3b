"""What a check says of a model lasts, unless memory was short while it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import target_of

from draftgraph import GraphDecoder
from draftgraph.engine import selfcheck, static
from draftgraph.engine.runner import EagerEngine
from draftgraph.engine.selfcheck import checked_engine
from draftgraph.engine.static import StaticEngine
from draftgraph.engine.static_cache import StaticCache


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
    monkeypatch.setattr(static, "StaticCache", failing(StaticCache, 1, SHORT))
    model = target_of("llama")
    assert [type(checked_engine(model)) for _ in range(2)] == [EagerEngine, StaticEngine]


def test_a_model_gets_its_static_engine_when_memory_is_there_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(selfcheck, "StaticEngine", failing(StaticEngine, 1, SHORT))
    model = target_of("llama")
    assert type(checked_engine(model)) is EagerEngine
    assert "slower: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in capsys.readouterr().err
    decoder = GraphDecoder(model)
    assert type(decoder.target_engine) is StaticEngine and not capsys.readouterr().err


def test_a_model_gets_trees_when_memory_is_there_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selfcheck, "EagerEngine", failing(EagerEngine, 2, SHORT))
    model = target_of("llama")
    assert not checked_engine(model).branching
    assert "chains only, and slower: OutOfMemoryError" in capsys.readouterr().err
    assert checked_engine(model).branching


def test_what_is_wrong_with_a_model_is_found_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTGRAPH_ENGINE", "static")
    monkeypatch.setattr(selfcheck, "StaticEngine", failing(StaticEngine, 1, RuntimeError("no such kernel")))
    model = target_of("llama")
    for _ in range(2):
        assert type(checked_engine(model)) is EagerEngine
    assert capsys.readouterr().err.count("RuntimeError: no such kernel") == 1
