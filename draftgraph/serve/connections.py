"""Connections: how long each may keep the server waiting, and how many there may be.

Uvicorn's protocol over h11, with limits. What is used of it is not documented; tests/test_serve_limits.py uses it all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftgraph.errors import UsageError
from draftgraph.serve.settings import ServerSettings

logger = logging.getLogger("draftgraph.serve")
ACCEPTED_AT_ONCE = 8  # asyncio takes so many before it looks at any of them, and as many again in the next rounds
OTHER_FILES = 64  # open besides connections: those just accepted, the engine's, the log
SLACK = 5.0  # seconds for status 408 to reach a client whose body did not come in time
READING_SECONDS = 60.0  # for a client to read what was written, as in nginx
SHUTDOWN_SECONDS = 2.0  # for a client to take leave of TLS
FREE_CHUNKS, LEAST_CHUNK = 4096, 16  # chunks of a body that may be of any size; bytes that the others must have
LENGTHS = {b"content-length", b"transfer-encoding"}


class Connections:
    """All that are open: first those that have not been answered for the longest time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings, self._tls = settings, tls_context(settings)
        self._most = affordable(settings.max_connections)
        self._open: dict[Connection, None] = {}
        self._seconds = {
            "headers": settings.header_seconds,
            "next headers": settings.idle_seconds + settings.header_seconds,  # Uvicorn closes those that send nothing
            "body": settings.body_seconds + SLACK,
            "reading": READING_SECONDS,
        }

    def protocol(self, **given: Any) -> asyncio.BaseProtocol:
        """Of a connection that was just accepted."""
        connection = Connection(self, **given)
        return connection if self._tls is None else Handshake(connection, self._tls)

    def reload_certificate(self) -> None:
        """For new connections."""
        if self._tls is not None:
            tls_context(self._settings)  # raises before the context in use is touched
            load_certificate(self._tls, self._settings)
            logger.info("the certificate in %s was read again", self._settings.tls_cert)

    def add(self, connection: Connection) -> None:
        """Closes the first that is not being answered if there are too many; that may be the new one."""
        self._open[connection] = None
        if len(self._open) > self._most:
            logger.warning("more than %d connections: one that is not being answered is closed", self._most)
            self._abort(next(one for one in self._open if one.awaited))

    def answered(self, connection: Connection) -> None:
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def discard(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def close_late(self) -> None:
        """To be called about once a second."""
        now = time.monotonic()
        for connection in list(self._open):
            if connection.seconds_awaited(now) > self._seconds.get(connection.awaited or "", math.inf):
                self._abort(connection)

    def _abort(self, connection: Connection) -> None:
        self.discard(connection)
        connection.abort()


def affordable(wanted: int) -> int:
    """As many connections as wanted, or as files may be open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(1, min(wanted, files - OTHER_FILES))


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise UsageError("--tls-key needs --tls-cert: give the certificate of this key")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: ServerSettings) -> None:
    assert settings.tls_cert is not None
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: b"")  # else OpenSSL asks for it
    except OSError as error:
        files = " and ".join(filter(None, (settings.tls_cert, settings.tls_key)))
        why = error.strerror or error
        raise UsageError(f"{files} cannot be used for TLS ({why}): give PEM files, the key unencrypted") from error


class Handshake(SSLProtocol):
    """TLS under a connection, which counts from when it is accepted: half a handshake must not keep it open."""

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            connection,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the end of the handshake
            server_side=True,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.accepted(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection.left()
        super().connection_lost(exc)


class Connection(H11Protocol):
    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = Parser(h11.SERVER)
        self._socket: Any = None  # the transport under all others
        self._connections = connections
        self._seen: tuple[Any, ...] = ()
        self._since = 0.0

    def accepted(self, transport: asyncio.BaseTransport) -> None:
        # asyncio does so for sockets that it makes: else what follows a head waits until the client acknowledges that.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = transport
        self._connections.add(self)

    def left(self) -> None:
        self._connections.discard(self)

    def abort(self) -> None:
        self._socket.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._socket is None:
            self.accepted(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.left()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._connections.answered(self)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # it has been answered already
            self.transport.close()

    @property
    def awaited(self) -> Literal["headers", "next headers", "body", "reading"] | None:
        """What the client has to do next; None while it is being answered."""
        if self.transport is None:  # a handshake
            return "headers"
        if self.transport.is_closing() or self.flow.write_paused:
            return "reading"
        if self.conn.their_state is h11.IDLE:
            return "headers" if self.cycle is None else "next headers"
        return "body" if self.conn.their_state is h11.SEND_BODY else None

    def seconds_awaited(self, now: float) -> float:
        """Since it was first seen to wait for the same part of the same request."""
        if (seen := (self.awaited, self.cycle)) != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class Parser(h11.Connection):
    """Refuses a body of two lengths, of which a proxy may believe the other, and one in a great many tiny chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if {name for name, _ in event.headers} >= LENGTHS:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // LEAST_CHUNK:
                raise h11.RemoteProtocolError("too many small chunks")
        return event
