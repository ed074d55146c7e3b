"""`/health`, `/ready`, `/metrics` and `/v1/models`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from draftgraph.serve.errors import JSONAnswer
from draftgraph.serve.generation import Server
from draftgraph.serve.jobs import unknown_model, window_of
from draftgraph.serve.schemas import Model, ModelList
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.submission import Failure


def status_routes(settings: ServerSettings, server: Server, errors: dict[int | str, Any]) -> APIRouter:
    router, engine, started = APIRouter(), server.engine, int(time.time())

    def model() -> Model:
        window = None if engine.ready is None else window_of(engine.ready, settings)
        return {
            "id": settings.model_name,
            "object": "model",
            "created": started,
            "owned_by": "draftgraph",
            "max_model_len": window,
        }

    @router.get("/health", tags=["status"])
    async def health() -> dict[str, str]:
        """Whether the API lives, whatever the engine does."""
        return {"status": "ok"}

    @router.get("/ready", tags=["status"], responses={503: errors[503]})
    async def ready() -> Any:
        """Whether requests can be answered."""
        if engine.closing:
            raise Failure("stopping", "the server is stopping")
        if engine.ready is None:
            raise Failure("engine", "the model is not ready: try again later")
        return JSONAnswer({"status": "ready"} | asdict(engine.ready))

    @router.get("/metrics", tags=["status"], response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        server.metrics.show_engine(engine.ready is not None, engine.figures)
        return Response(server.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @router.get("/v1/models", tags=["OpenAI"], responses={401: errors[401]})
    async def models() -> ModelList:
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}", tags=["OpenAI"], responses={401: errors[401], 404: errors[404]})
    async def one_model(name: str) -> Model:
        if name != settings.model_name:
            raise unknown_model(name, settings)
        return model()

    return router
