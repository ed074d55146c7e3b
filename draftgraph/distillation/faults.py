"""What stops a long run, said in one line with what to do; what was done until then is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from draftgraph.errors import DraftGraphError


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


@contextmanager
def out_of_memory_means(line: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DraftGraphError(f"out of memory with {line}") from error


def naming_batch_size(rows: int) -> AbstractContextManager[None]:
    """Running out of memory inside becomes an error that names the batch size to try."""
    advice = f"try --batch-size {max(1, rows // 2)}" if rows > 1 else "one text at a time does not fit"
    return out_of_memory_means(f"{rows} texts at once: {advice}; what was done is kept")


def naming_batch_tokens(tokens: int) -> AbstractContextManager[None]:
    advice = f"try --batch-tokens {max(16, tokens // 2)}"
    return out_of_memory_means(f"{tokens} tokens in a step of training: {advice}; the last checkpoint is kept")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done as a whole."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere, none arrives
    if not in_main_thread or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    waiting: list[Any] = []
    original = signal.signal(signal.SIGINT, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, original)
        if waiting and callable(original):
            original(*waiting[0])
