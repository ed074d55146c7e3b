"""What a request hears of its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType

from draftgraph.errors import DraftGraphError
from draftgraph.serve.wire import Progress


class Failure(DraftGraphError):
    """A job that came to nothing; `kind` is one of those of `Progress.error`, or "deadline" or "stopping"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Submission:
    """Jobs of one request: an iterator over their progress until all are done. Leaving it cancels the rest."""

    def __init__(self, ids: Iterable[str], cancel: Callable[[str], None]) -> None:
        self._open, self._cancel = set(ids), cancel
        self._queue: asyncio.Queue[Progress] = asyncio.Queue()

    def tell(self, progress: Progress) -> None:
        self._queue.put_nowait(progress)

    async def __aenter__(self) -> Submission:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for id in list(self._open):
            self.cancel(id)

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> Progress:
        while self._open:
            progress = await self._queue.get()
            if progress.id not in self._open:
                continue
            if progress.finish_reason is not None:
                self._open.discard(progress.id)
            return progress
        raise StopAsyncIteration

    def cancel(self, id: str) -> None:
        self._open.discard(id)
        self._cancel(id)
