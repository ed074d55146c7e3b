"""What a request passes before it is read: a name for the log, the key, and a limit on its body."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftgraph.serve.errors import GONE, SERVER_FAULT, ApiError, ClientGone, answer
from draftgraph.serve.metrics import Metrics
from draftgraph.serve.settings import Keys, ServerSettings, is_loopback

if TYPE_CHECKING:
    from draftgraph.serve.tracing import Tracing

logger = logging.getLogger("draftgraph.serve")
WATCHED = ("/health", "/ready", "/metrics")  # asked for every few seconds: not worth a line
OPEN = ("/", "/health", "/ready", "/docs", "/openapi.json")
OPEN_UNDER = "/playground/"
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
MOST_CONTAINERS = 1 << 18  # objects and lists in one body: a million of them take a third of a second to read


@dataclass(frozen=True)
class Outcome:
    """How a request ended."""

    method: str
    route: str
    status: int  # in the end, whatever a stream had begun with
    seconds: float
    request_id: str
    code: str | None = None  # of an error
    in_stream: bool = False  # the error

    def __str__(self) -> str:
        error = f" {self.code}{' in a stream' * self.in_stream}" if self.code else ""
        return f"{self.method} {self.route} {self.status}{error} {self.seconds:.3f} s, request {self.request_id}"


class Counted:
    """Counts, logs and traces every request by its route: what a client wrote into a path or a body stays out of it.

    What another server has answered is counted there: then its state has `answered_by`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None = None, adds_id: bool = True) -> None:
        self._app, self._metrics, self._tracing, self._adds_id = app, metrics, tracing, adds_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status, id = time.monotonic(), GONE, request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._adds_id:
                    message["headers"] = [*message.get("headers", []), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            if status != GONE:  # an answer has begun: the server closes the connection
                status = 500
                raise
            logger.exception("request %s failed", id)
            await answer(ApiError(500, SERVER_FAULT, type="server_error"))(scope, receive, named_send)
        finally:
            route, seconds = getattr(scope.get("route"), "path", "other"), time.monotonic() - started
            error: ApiError | None = state.get("error")
            outcome = Outcome(scope["method"], route, status, seconds, id)
            if error is not None:
                outcome = replace(outcome, status=error.status, code=error.code, in_stream=status < 400)
            if "answered_by" not in state:
                self._record(scope, outcome)

    def _record(self, scope: Scope, outcome: Outcome) -> None:
        self._metrics.count_request(outcome.route, outcome.status, outcome.seconds)
        if outcome.in_stream and outcome.status != GONE:
            self._metrics.stream_errors.labels(outcome.code).inc()
        never_came = outcome.status == GONE and outcome.route == "other"  # as with thousands of half-sent bodies
        is_worth_telling = not (outcome.route in WATCHED or never_came)
        logger.log(
            logging.INFO if is_worth_telling else logging.DEBUG, "%s", outcome, extra={"fields": asdict(outcome)}
        )
        if self._tracing is not None and is_worth_telling:
            self._tracing.record(outcome, trace_headers(scope), scope["state"].get("generation"))


def request_id(scope: Scope) -> str:
    """The client's, if it can stand in a log."""
    given = (header(scope, b"x-request-id") or b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class KeyRequired:
    """Lets nobody past without a key, if there are keys, but for pages that tell nothing."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        tenant = self._keys.tenant(header(scope, b"authorization"))
        if tenant is None and not is_open(scope):
            message = "a valid API key is needed: send it as Authorization: Bearer KEY"
            refused = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return await answer(refused)(scope, receive, send)
        scope.setdefault("state", {})["tenant"] = tenant or ""
        await self._app(scope, receive, send)


class OwnName:
    """Answers on this machine only if asked by its name: a page elsewhere may have its own name lead here.

    See DNS rebinding. Keys protect as well, and a server for others must answer to names it does not know.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._names = {"localhost", settings.host, *settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_own(header(scope, b"host") or b""):
            refused = ApiError(403, "not under this name: start with --allow-host to allow it", code="unknown_host")
            return await answer(refused)(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_own(self, host: bytes) -> bool:
        name = re.sub(r":\d*$", "", host.decode("latin-1")).strip("[]")
        return name in self._names or is_loopback(name)


class BodyLimit:
    """Reads a body before anybody else does: it must be small enough, and come in time."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                body = await self._read(scope, receive)
        except TimeoutError:
            slow = ApiError(408, "the request did not come in time", code="slow_request")
            return await answer(slow)(scope, receive, send)
        except ApiError as error:
            return await answer(error)(scope, receive, send)
        except ClientGone:
            return
        scope.setdefault("state", {})["body_length"] = len(body)
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, received, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        most, parts, length, more = self._settings.max_body, [], 0, True
        announced = header(scope, b"content-length") or b"0"
        too_large = ApiError(413, f"the body may have {most} bytes at most", code="body_too_large")
        if announced.isdigit() and int(announced[:20]) > most:
            raise too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > most:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(parts)


class JSONRequest(Request):
    """Its JSON has no lone surrogates and at most 200 levels: nothing behind it has to check that."""

    async def json(self) -> Any:
        body = await self.body()
        if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:  # a text that fits a window has fewer of the two
            raise HTTPException(400, f"the body may have {MOST_CONTAINERS} objects and lists at most")
        try:
            return from_json(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from error


class JSONRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer_json = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await answer_json(JSONRequest(request.scope, request.receive))

        return answer


def trace_headers(scope: Scope) -> dict[str, str]:
    found = {name: header(scope, name.encode()) for name in ("traceparent", "tracestate")}
    return {name: value.decode("latin-1") for name, value in found.items() if value is not None}


def header(scope: Mapping[str, Any], name: bytes) -> bytes | None:
    return next((value for known, value in scope["headers"] if known == name), None)


def is_open(scope: Scope) -> bool:
    """CORS asks with OPTIONS, and without a key."""
    path: str = scope["path"]
    return path in OPEN or path.startswith(OPEN_UNDER) or scope["method"] == "OPTIONS"
