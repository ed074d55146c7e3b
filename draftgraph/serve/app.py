"""The server's routes and what surrounds them, put together."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from starlette.responses import HTMLResponse, Response

from draftgraph import __version__
from draftgraph.inspect.theme import template
from draftgraph.serve import errors, playground, responses
from draftgraph.serve.answer_schemas import ChatAnswer, Completion, Detokenized, Model, ModelList, Tokenized
from draftgraph.serve.answers import ChatForm, CompletionForm, respond, while_present
from draftgraph.serve.engine import Engine
from draftgraph.serve.errors import JSONAnswer
from draftgraph.serve.generation import Server
from draftgraph.serve.guard import BodyLimit, Counted, JSONRoute, KeyRequired, OwnName
from draftgraph.serve.jobs import JobMaker, chat_jobs, check_model, check_tokens, completion_jobs, window_of
from draftgraph.serve.metrics import Metrics, written
from draftgraph.serve.responses import ResponseForm, ResponsesRequest, chat_of
from draftgraph.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Decoding,
    DetokenizeRequest,
    TokenizeChat,
    TokenizeRequest,
)
from draftgraph.serve.settings import Keys, ServerSettings, is_loopback
from draftgraph.serve.tracing import tracing_of
from draftgraph.text import decode

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


def create_app(settings: ServerSettings, engine: Engine, tokenizer: Any, behind_door: bool = False) -> FastAPI:
    """An app that answers with this engine, which it starts and stops.

    `behind_door`: what comes was let in elsewhere, by `guard`, which has put tenant and length into its state.
    """
    metrics = Metrics(settings.model_name, settings.vllm_metrics)
    engine.on_finished = metrics.count_job
    engine.on_failure = metrics.failures.inc
    server, tracing = Server(settings, engine, tokenizer, metrics), tracing_of(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        await engine.stop()
        if tracing is not None:
            tracing.close()

    app = FastAPI(
        title="draftgraph",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(health_routes())
    app.include_router(status_routes(server))
    app.include_router(generation_routes(server))
    app.include_router(tokenizer_routes(server))
    install_docs(app)
    playground.mount(app)
    errors.install(app)
    app.state.server = server
    if not behind_door:
        guard(app, settings, Keys(settings.api_keys))
    app.add_middleware(Counted, metrics=metrics, tracing=tracing)
    return app


def guard(app: FastAPI, settings: ServerSettings, keys: Keys) -> None:
    """What a request passes before a route reads it. The keys stay in the app's state, where they can be replaced."""
    app.add_middleware(BodyLimit, settings=settings)
    app.state.keys = keys
    app.add_middleware(KeyRequired, keys=keys)
    if is_loopback(settings.host) and keys.let_all_in:
        app.add_middleware(OwnName, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )


def generation_routes(server: Server) -> APIRouter:
    router, settings = APIRouter(tags=["OpenAI"], route_class=JSONRoute), server.settings

    def maker(request: Request, body: Decoding, prompt_field: str) -> JobMaker:
        if settings.log_prompts:
            logger.info("asked: %s", body.model_dump_json(exclude_none=True))
        return JobMaker(settings, server.engine.require_ready(), request.state.tenant, prompt_field)

    @router.post("/v1/chat/completions", response_model=ChatAnswer, responses=ERRORS | STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a chat."""
        with server.reading(request, body.answers) as prompts:
            made = chat_jobs(body, prompts, maker(request, body, "messages"), server.formats)
            form = ChatForm(server, body, await while_present(request.receive, made))
        return await respond(request, form, bool(body.stream), settings.deadline)

    @router.post("/v1/responses", response_model=responses.Response, responses=ERRORS | STREAM)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation, of which nothing is kept."""
        chat = chat_of(body)
        with server.reading(request, chat.answers) as prompts:
            made = chat_jobs(chat, prompts, maker(request, body, "input"), server.formats)
            form = ResponseForm(server, body, chat, await while_present(request.receive, made))
        return await respond(request, form, bool(body.stream), settings.deadline)

    @router.post("/v1/completions", response_model=Completion, responses=ERRORS | STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or more texts."""
        with server.reading(request, body.answers) as prompts:
            made = completion_jobs(body, prompts, maker(request, body, "prompt"))
            form = CompletionForm(server, body, await while_present(request.receive, made))
        return await respond(request, form, bool(body.stream), settings.deadline)

    return router


def tokenizer_routes(server: Server) -> APIRouter:
    """As vLLM has them."""
    router, settings = APIRouter(tags=["vLLM"], route_class=JSONRoute), server.settings

    @router.post("/tokenize", response_model=Tokenized, responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text or of a chat."""
        check_model(body.model, settings)
        window = window_of(server.engine.require_ready(), settings)
        with server.reading(request, 1) as prompts:
            if isinstance(body, TokenizeChat):
                made = prompts.of_chat(body, window)
            else:
                made = prompts.of_text(body.prompt, window, body.add_special_tokens)
            tokens = await while_present(request.receive, made)

            def answer() -> Response:
                names = prompts.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
                found = {"count": len(tokens), "max_model_len": window, "tokens": tokens, "token_strs": names}
                return JSONAnswer(found)

            return await prompts.aside(answer)

    @router.post("/detokenize", response_model=Detokenized, responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of tokens."""
        check_model(body.model, settings)
        check_tokens(body.tokens, server.engine.require_ready(), "tokens")
        with server.reading(request, 1) as prompts:
            decoded = prompts.aside(lambda: decode(prompts.tokenizer, body.tokens, frozenset()))
            return JSONAnswer({"prompt": await while_present(request.receive, decoded)})

    return router


def health_routes() -> APIRouter:
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", tags=["status"])
    async def health() -> dict[str, str]:
        """Whether the API lives, whatever the engine does."""
        return {"status": "ok"}

    return router


def status_routes(server: Server) -> APIRouter:
    router, settings, engine, started = APIRouter(), server.settings, server.engine, int(time.time())

    def model(name: str) -> Model:
        window = None if engine.ready is None else window_of(engine.ready, settings)
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "draftgraph",
            "root": settings.model_name,
            "parent": settings.model_name if name in settings.adapters else None,
            "max_model_len": window,
            "exact": None if engine.ready is None else engine.ready.exact,
        }

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", tags=["status"], responses={503: ERRORS[503]})
    async def ready() -> Any:
        """Whether requests can be answered, and soon."""
        found = engine.require_ready()
        if engine.is_silent:
            raise errors.failure("engine", "the engine has said nothing for a while: try again later")
        return JSONAnswer({"status": "ready"} | asdict(found))

    @router.get("/metrics", tags=["status"], response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return figures_answer(server.figures())

    @router.get("/v1/models", tags=["OpenAI"], responses={401: ERRORS[401]})
    async def models() -> ModelList:
        return {"object": "list", "data": [model(name) for name in settings.names]}

    @router.get("/v1/models/{name:path}", tags=["OpenAI"], responses={401: ERRORS[401], 404: ERRORS[404]})
    async def one_model(name: str) -> Model:
        check_model(name, settings)
        return model(name)

    return router


def figures_answer(figures: Iterable[Metric]) -> Response:
    return Response(written(figures), headers={"Content-Type": CONTENT_TYPE_LATEST})


def install_docs(app: FastAPI) -> None:
    """A page of every route and field, with nothing fetched from elsewhere; a schema without what is never sent."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        schema = original()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # sent as 400, as OpenAI does
        return schema

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = template("docs.html", "draftgraph.serve")
        return HTMLResponse(page.render(app.openapi(), kind=kind_of, bounds=bounds_of))


def kind_of(field: dict[str, Any]) -> str:
    if choices := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(kind_of(one) for one in choices if one.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {kind_of(field.get('items', {}))}"
    return str(field.get("type", "any"))


def bounds_of(field: dict[str, Any]) -> str:
    for one in (field, *field.get("anyOf", [])):
        least = one.get("minimum", one.get("exclusiveMinimum"))
        most = one.get("maximum", one.get("exclusiveMaximum"))
        if least is not None and most is not None:
            return f"{least:g} to {most:g}"
    return ""
