"""The server's routes and what surrounds them, put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from draftgraph import __version__
from draftgraph.serve import docs_page, errors, playground
from draftgraph.serve.chat import ChatForm, chat_generation
from draftgraph.serve.completions import CompletionForm, completion_generation
from draftgraph.serve.engine import Engine
from draftgraph.serve.generation import Server
from draftgraph.serve.guard import BodyLimit, Counted, KeyRequired, OwnName
from draftgraph.serve.jobs import JobMaker
from draftgraph.serve.keys import Keys
from draftgraph.serve.metrics import Metrics
from draftgraph.serve.schemas import ChatAnswer, ChatRequest, Completion, CompletionRequest
from draftgraph.serve.settings import ServerSettings, is_loopback
from draftgraph.serve.status import status_routes
from draftgraph.serve.streaming import respond

logger = logging.getLogger("draftgraph.serve")
STATUSES = {
    400: "What was asked for cannot be",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The request did not come in time",
    413: "The body is too large",
    429: "Too many requests are waiting: try again later",
    503: "The model is not ready, or failed: try again later",
    504: "The answer took too long",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": errors.ErrorBody, "description": description} for status, description in STATUSES.items()
}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}}  # a chunk as JSON, and [DONE] in the end
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


def create_app(settings: ServerSettings, engine: Engine, tokenizer: Any) -> FastAPI:
    """An app that answers with this engine, which it starts and stops."""
    metrics = Metrics(settings.model_name, settings.vllm_metrics)
    engine.on_finished = metrics.count_stats
    engine.on_failure = metrics.failures.inc
    server = Server(engine, tokenizer, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.stop()

    app = FastAPI(
        title="draftgraph",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(status_routes(settings, server, ERRORS))
    add_generation_routes(app, settings, server)
    docs_page.install(app)
    playground.mount(app)
    errors.install(app)
    app.add_middleware(BodyLimit, settings=settings)
    app.add_middleware(KeyRequired, keys=Keys(settings.api_keys))
    if is_loopback(settings.host) and not settings.api_keys:
        app.add_middleware(OwnName, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Counted, metrics=metrics)
    return app


def add_generation_routes(app: FastAPI, settings: ServerSettings, server: Server) -> None:
    def maker(request: Request, prompt_field: str) -> JobMaker:
        return JobMaker(settings, server.engine.ready, request.state.tenant, prompt_field)

    def log(body: ChatRequest | CompletionRequest) -> None:
        if settings.log_prompts:
            logger.info("asked: %s", body.model_dump_json(exclude_none=True))

    @app.post("/v1/chat/completions", tags=["OpenAI"], response_model=ChatAnswer, responses=ERRORS | STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a chat."""
        log(body)
        generation = await chat_generation(body, server, maker(request, "messages"))
        form = ChatForm(generation, body, server, settings.model_name)
        return await respond(request, generation, form, bool(body.stream), settings.deadline)

    @app.post("/v1/completions", tags=["OpenAI"], response_model=Completion, responses=ERRORS | STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or more texts."""
        log(body)
        generation = await completion_generation(body, server, maker(request, "prompt"))
        form = CompletionForm(generation, body, server, settings.model_name)
        return await respond(request, generation, form, bool(body.stream), settings.deadline)
