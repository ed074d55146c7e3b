"""Starts the server and sees it through to its end. This process has the tokenizer of the model, not its weights."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI

from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.models.load import find_source, load_tokenizer
from draftgraph.serve.app import create_app
from draftgraph.serve.connections import ACCEPTED_AT_ONCE, Connection, Connections
from draftgraph.serve.engine import Engine
from draftgraph.serve.settings import ServerSettings

BACKLOG = 2048  # connections that the system keeps until they are accepted
LAST_WORDS = 2  # seconds for the errors that end what is still under way after the grace time


class GracefulServer(uvicorn.Server):
    """Told to stop, it takes no new requests and gives those under way their time."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: float, connections: Connections) -> None:
        super().__init__(config)
        self._engine, self._grace, self._connections = engine, grace, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)  # asyncio has set it to how many it accepts at once

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # of tenths of a second
            self._connections.close_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain(self._grace)
        await super().shutdown(sockets)


def run(settings: ServerSettings, tokenizer: Any, engine_options: dict[str, Any]) -> None:
    """Serves until it is told to stop; raises if it cannot listen or the model cannot be loaded."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice as many lines for nothing
    command = [sys.executable, "-m", "draftgraph.serve.engine_process", json.dumps(engine_options)]
    engine = Engine(command, settings)
    server = server_of(create_app(settings, engine, tokenizer), settings, engine)
    engine.on_failed_start = lambda: setattr(server, "should_exit", True)
    with listening(settings) as listener, logging_to_stderr():
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        logging.getLogger("draftgraph.serve").info(
            "http://%s:%s loads %s", shown, listener.getsockname()[1], settings.model_name
        )
        gc.freeze()  # what is there stays: a large request must not have all of it looked through again and again
        server.run(sockets=[listener])
    if engine.failed_to_start is not None:
        raise DraftGraphError(engine.failed_to_start)


def server_of(app: FastAPI, settings: ServerSettings, engine: Engine) -> GracefulServer:
    connections = Connections(settings)
    config = uvicorn.Config(
        app,
        http=partial(Connection, connections),  # type: ignore[arg-type]
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
    return GracefulServer(config, engine, settings.grace, connections)


def listening(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise DraftGraphError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; choose another --port"
        ) from error


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Requests and failures of the engine, one line each; of libraries, warnings only."""
    before = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("draftgraph.serve").setLevel(logging.INFO)
    repeats = RepeatLimit()
    for handler in logging.root.handlers:
        handler.addFilter(repeats)
    try:
        yield
    finally:
        logging.disable(before)
        for handler in logging.root.handlers:
            handler.removeFilter(repeats)


class RepeatLimit(logging.Filter):
    """Lets few warnings of one line of code pass in a while: clients can cause some of them as often as they like."""

    def __init__(self, most: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.pathname, record.lineno), time.monotonic()
        started, count = self._counts.get(place, (now, 0))
        if now - started > self._seconds:
            if count > self._most:
                record.msg, record.args = f"{record.getMessage()} ({count - self._most} more were not logged)", ()
            started, count = now, 0
        self._counts[place] = started, count + 1
        return count < self._most


def served_tokenizer(target: str | None) -> Any:
    """The tokenizer that `draftgraph.load` would find for this target."""
    source = find_source(target, "target", None, {"use_safetensors": True, "trust_remote_code": False})
    tokenizer = load_tokenizer(source, trust_remote_code=False) or load_tokenizer(base_of(source))
    if tokenizer is None:
        raise UsageError(f"{target} has no tokenizer: a server needs one")
    return tokenizer


def base_of(source: str) -> str:
    """The model under an adapter; any other is its own."""
    file = Path(source) / "adapter_config.json"
    return str(json.loads(file.read_text())["base_model_name_or_path"]) if file.is_file() else source
