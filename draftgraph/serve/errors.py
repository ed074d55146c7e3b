"""Failures as OpenAI's clients expect them: a status, and a body with a message, a type, a parameter and a code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

T = TypeVar("T")
RETRY_SECONDS = "1"
GONE = 499  # nginx's status for a client that went away: only the log and the metrics see it
SERVER_FAULT = "the server failed to answer: its log says more"


class ErrorDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetails


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.code = status, headers or {}, code or type
        self.body: ErrorBody = {"error": {"message": message, "type": type, "param": param, "code": code}}


class Rows(Generic[T]):
    """A list in JSON whose elements are made while it is written: other threads run in between, and there are never so
    many that looking through them for garbage takes long."""

    def __init__(self, make: Callable[[T], Any], items: Sequence[T]) -> None:
        self._make, self._items = make, items

    def __iter__(self) -> Iterator[Any]:
        return (self._make(item) for item in self._items)


def json_bytes(content: Any) -> bytes:
    """JSON that can always be written, lone surrogates and all; pydantic's writer is the faster by far."""
    with contextlib.suppress(PydanticSerializationError):
        return to_json(content, fallback=iter)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=list)
    return text.encode("utf-8", "backslashreplace")


class JSONAnswer(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


class ClientGone(Exception):
    """The client disconnected."""


def gone() -> ApiError:
    return ApiError(GONE, "the client went away", code="client_gone")


def refusal(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client asked for something that cannot be."""
    return ApiError(400, message, param=param, code=code)


def failure(kind: str, message: str) -> ApiError:
    """The answer to a job that failed; `kind` as in `Progress.error`, or "deadline" or "stopping"."""
    again = {"Retry-After": RETRY_SECONDS}
    if kind == "usage":
        return refusal(message)
    if kind == "overloaded":
        return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=again)
    if kind == "deadline":  # asked again, it would take as long
        return ApiError(504, message, type="timeout_error", code="deadline", headers={"x-should-retry": "false"})
    codes = {"memory": "out_of_memory", "stopping": "server_stopping"}
    return ApiError(503, message, type="server_error", code=codes.get(kind, "engine_unavailable"), headers=again)


def answer(error: ApiError) -> Response:
    return JSONAnswer(error.body, error.status, error.headers)


def install(app: FastAPI) -> None:
    """Gives every failure of the app the same form."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        request.state.error = error
        return answer(error)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return answer(from_validation(error))

    @app.exception_handler(HTTPException)
    async def wrong_route(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        said = {404: f"there is no {request.method} {request.url.path}", 405: f"{request.method} is not allowed here"}
        return answer(ApiError(error.status_code, said.get(error.status_code, str(error.detail)), headers=headers))


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, by its name."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:] if not str(part).startswith(("<", "["))]  # arms of unions, keys
    if field := first.get("ctx", {}).get("field"):
        name = ".".join([*place, field])
        return refusal(f"{name}: {first['msg']}", param=name, code=first["type"])
    if first["type"] == "value_error" and not place:
        return refusal(first["msg"].removeprefix("Value error, "))
    if not place:
        return refusal(f"the body must be a JSON object, sent as application/json: {first['msg']}")
    return refusal(f"{'.'.join(place)}: {first['msg'].removeprefix('Value error, ')}", param=place[0])
