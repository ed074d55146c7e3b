"""Starts the server and sees it through to its end."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from draftgraph.serve.engine import Engine
from draftgraph.serve.settings import ServerSettings

LAST_WORDS = 2  # seconds for the errors that end what is still under way after the grace time


class GracefulServer(uvicorn.Server):
    """Told to stop, it takes no new requests and gives those under way their time."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float) -> None:
        super().__init__(config)
        self._engine, self._grace = engine, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain(self._grace)
        await super().shutdown(sockets)


def server_of(app: FastAPI, settings: ServerSettings, engine: Engine) -> GracefulServer:
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,  # requests are logged by their routes
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace) + LAST_WORDS,
    )
    return GracefulServer(config, engine, settings.grace)
