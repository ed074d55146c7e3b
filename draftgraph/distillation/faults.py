"""What stops a long run, said in one line with what to do; what was done until then is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftgraph.errors import DraftGraphError


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


@contextmanager
def naming_batch_size(rows: int) -> Iterator[None]:
    """Running out of memory inside becomes an error that names the batch size to try."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        advice = f"try --batch-size {max(1, rows // 2)}" if rows > 1 else "one text at a time does not fit"
        raise DraftGraphError(f"out of memory with {rows} texts at once: {advice}; what was done is kept") from error


@contextmanager
def naming_batch_tokens(tokens: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DraftGraphError(
            f"out of memory with {tokens} tokens in a step of training: try --batch-tokens {max(16, tokens // 2)}; "
            "the last checkpoint is kept"
        ) from error
