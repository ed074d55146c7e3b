"""Starts the server and sees it through to its end. This process has the tokenizer of the model, not its weights."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI

from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.models.load import find_source, load_tokenizer
from draftgraph.serve.app import create_app
from draftgraph.serve.connections import ACCEPTED_AT_ONCE, Connections
from draftgraph.serve.engine import Engine
from draftgraph.serve.logs import logging_to_stderr
from draftgraph.serve.settings import Keys, ServerSettings, read_keys

logger = logging.getLogger("draftgraph.serve")
BACKLOG = 2048  # connections that the system keeps until they are accepted
LAST_WORDS = 2  # seconds for the errors that end what is still under way after the grace time


class GracefulServer(uvicorn.Server):
    """Told to stop, it takes no new requests and gives those under way their time."""

    def __init__(
        self, config: uvicorn.Config, settings: ServerSettings, engine: Engine, keys: Keys, connections: Connections
    ) -> None:
        super().__init__(config)
        self._settings, self._engine, self._keys, self._connections = settings, engine, keys, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        reloads = self._settings.key_file or self._settings.tls_cert
        if reloads and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has set it to how many it accepts at once

    def reload(self) -> None:
        """Reads keys and certificate again, for requests to come; what cannot be read stays as it was."""
        for read in (self._reload_keys, self._connections.reload_certificate):
            try:
                read()
            except UsageError as error:
                logger.error("not read again: %s", error)

    def _reload_keys(self) -> None:
        if self._settings.key_file is not None:
            self._keys.replace(read_keys(self._settings.key_file))
            logger.info("the API keys in %s were read again", self._settings.key_file)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # of tenths of a second
            self._connections.close_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        started, under_way, grace = time.monotonic(), self._engine.under_way, self._settings.grace
        logger.info("stopping: %d answers under way have %g seconds to end", under_way, grace)
        self._engine.drain(grace)
        await super().shutdown(sockets)
        logger.info("stopped after %.1f seconds", time.monotonic() - started)


def run(settings: ServerSettings, tokenizer: Any, engine_options: dict[str, Any]) -> None:
    """Serves until it is told to stop; raises if it cannot listen or the model cannot be loaded."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice as many lines for nothing
    engine = Engine(engine_command(engine_options), settings)
    server = server_of(create_app(settings, engine, tokenizer), settings, engine)
    engine.on_failed_start = lambda: setattr(server, "should_exit", True)
    with listening(settings) as listener, logging_to_stderr(settings):
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.tls_cert is None else "https"
        logger.info("%s://%s:%s loads %s", scheme, shown, listener.getsockname()[1], settings.model_name)
        gc.freeze()  # what is there stays: a large request must not have all of it looked through again and again
        server.run(sockets=[listener])
    if engine.failed_to_start is not None:
        raise DraftGraphError(engine.failed_to_start)


def engine_command(options: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "draftgraph.serve.engine_process", json.dumps(options)]


def server_of(app: FastAPI, settings: ServerSettings, engine: Engine) -> GracefulServer:
    connections = Connections(settings)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,  # requests are logged by their routes
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace) + LAST_WORDS,
    )
    return GracefulServer(config, settings, engine, app.state.keys, connections)


def listening(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise DraftGraphError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; choose another --port"
        ) from error


def served_tokenizer(target: str | None) -> Any:
    """The tokenizer that `draftgraph.load` would find for this target."""
    options: dict[str, Any] = {"use_safetensors": True, "trust_remote_code": False}
    source = find_source(target, "target", None, options, few_bits=True)  # what takes least room of a GGUF file
    tokenizer = load_tokenizer(source, trust_remote_code=False) or load_tokenizer(base_of(source))
    if tokenizer is None:
        raise UsageError(f"{target} has no tokenizer: a server needs one")
    return tokenizer


def base_of(source: str) -> str:
    """The model under an adapter; any other is its own."""
    file = Path(source) / "adapter_config.json"
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else source
