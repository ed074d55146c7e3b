"""Answers while they come: server-sent events, which end when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftgraph.serve.errors import SERVER_FAULT, ApiError, ClientGone, JSONAnswer, json_bytes
from draftgraph.serve.forms import Form
from draftgraph.serve.generation import Delta

logger = logging.getLogger("draftgraph.serve")
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is for nginx
SLOW_READER_SECONDS = 60.0  # for the rest of a stream when the request's own time is over
T = TypeVar("T")


async def respond(request: Request, form: Form, stream: bool, seconds: float) -> Response:
    """The answer whole, or as a stream; a failure before its first delta is still a plain error."""
    deltas = form.generation.deltas()
    if not stream:
        async with aclosing(deltas):
            return JSONAnswer(form.whole(await while_present(request.receive, gathered(deltas))))
    first = await while_present(request.receive, anext(deltas, None))
    return EventStream(events(form, first, deltas), deltas, seconds + SLOW_READER_SECONDS)


async def gathered(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def events(form: Form, first: Delta | None, rest: AsyncIterator[Delta]) -> AsyncGenerator[bytes, None]:
    try:
        for body in form.opening():
            yield event(body)
        if first is not None:
            yield event(form.event(first))
        async for delta in rest:
            yield event(form.event(delta))
        if last := form.last():
            yield event(last)
    except ApiError as error:
        yield event(error.body)
    except Exception:
        logger.exception("a stream failed")
        yield event(ApiError(500, SERVER_FAULT, type="server_error").body)
    yield b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"


class EventStream(Response):
    """Sends events until the client goes away; the request behind them is closed in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None], seconds: float) -> None:
        self.status_code, self.background = 200, None
        self._events, self._source, self._seconds = events, source, seconds
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await while_present(receive, self._send(send))
        except (ClientGone, TimeoutError):
            return
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_present(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is dropped when the client goes away."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnection(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
