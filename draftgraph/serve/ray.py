"""Replicas of the server on a Ray cluster: `serve run draftgraph.serve.ray:app replicas=2`, or `serve deploy FILE`.

    Serve's proxies ─► Door: keys, limits of bodies ─► Replica: routes and engine, as in `draftgraph serve`

A door reads each request, because only the body tells which conversation it goes on, and hands it to the replica that
has the pages of that conversation. What the replica sends is passed on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import prometheus_client
import ray
from fastapi import FastAPI
from prometheus_client.core import Metric
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from draftgraph.config import GraphConfig
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.serve import errors
from draftgraph.serve.app import create_app, figures_answer, guard, health_routes
from draftgraph.serve.conversations import Asked, Taken, conversation_of
from draftgraph.serve.engine import Engine
from draftgraph.serve.errors import ApiError, failure, json_bytes
from draftgraph.serve.guard import Counted, header
from draftgraph.serve.logs import logging_to_stderr
from draftgraph.serve.metrics import Metrics, labelled
from draftgraph.serve.ray_router import ConversationRouter
from draftgraph.serve.run import engine_command, served_tokenizer
from draftgraph.serve.service import Service, service_of
from draftgraph.serve.settings import Keys, ServerSettings, keys_of_file

logger = logging.getLogger("draftgraph.serve")
DOOR, REPLICA = "Door", "Replica"  # names of deployments, of which a file of `serve deploy` may say more
AT_DOOR = ServerSettings.max_connections  # requests under way at one door
DRAIN_SECONDS = 1.0  # between two looks at what is still under way
TRIES = 3  # of a request that has not begun
PLACE_SECONDS = 30.0  # for a replica to take it
FIGURES_SECONDS = 5.0  # for replicas to tell their figures
KEYS_SECONDS = 5.0  # between two looks at the file of keys
BATCHES = 500  # a second, of all streams of a replica: each takes a millisecond of it, of a door and of a proxy
PAUSE = 0.02  # seconds between two batches of one stream, at least
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
Figures = tuple[str, list[Metric]]  # with the name of the replica whose they are

LOAD = ("target", "draft", "device", "dtype", "quantize", "tensor_parallel")  # arguments of `draftgraph.load`
GRAPH = ("mode", "k", "tau", "theta_prob", "theta_sib", "max_nodes", "max_depth", "chain_length", "growth", "exact")
OF_PROXIES = ("host", "port", "tls_cert", "tls_key", "max_connections", "header_seconds", "idle_seconds")
RENAMED = ("model_name", "aliases", "adapters", "api_keys", "cors_origins", "allowed_hosts", "max_tokens")


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application. Its arguments are the fields of `Scale` and the options of `draftgraph serve`, by their names.

    Examples:
        >>> app({"replicas": 2, "port": 80})
        Traceback (most recent call last):
        draftgraph.errors.UsageError: port is not a replica's: Serve's proxies listen, as their http_options say
    """
    scale, service = read_arguments(arguments)
    settings = service.settings
    keys = Keys(settings.api_keys if settings.key_file is None else keys_of_file(Path(settings.key_file)))
    settings = replace(settings, api_keys=())  # what is sent through the cluster has their digests only
    common: dict[str, Any] = {
        "graceful_shutdown_timeout_s": settings.grace,
        "graceful_shutdown_wait_loop_s": DRAIN_SECONDS,
        "logging_config": {"enable_access_log": False},  # requests are logged by their routes
    }
    routing = {"slack": max(1, settings.max_texts // 4)}
    replicas = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=2 * (settings.max_texts + settings.max_waiting),  # what is too much it refuses itself
        request_router_config=RequestRouterConfig(
            request_router_class=ConversationRouter,  # type: ignore[arg-type]  # its fields are declared twice
            request_router_kwargs=routing,
        ),
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.gpus(service)},
        **scale.counts(settings),
        **common,
    )(Replica)
    doors = serve.deployment(
        name=DOOR,
        num_replicas=scale.doors or max(1, scale.most),
        max_ongoing_requests=AT_DOOR,
        ray_actor_options={"num_cpus": 0},
        **common,
    )(serve.ingress(lambda: door(settings, keys))(Door))
    return doors.bind(replicas.bind(replace(service, settings=settings)))


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each takes of the cluster.

    Attributes:
        replicas: So many; with `max_replicas`, so many at least.
        max_replicas: As many as requests need, up to this.
        autoscaling: More of Serve's `autoscaling_config`, such as `{"upscale_delay_s": 10}`.
        num_cpus: Processors of a replica, which are its threads as well.
        num_gpus: GPUs of a replica, all on one machine; left out: one for each rank of the target if there are any.
        doors: Processes that read requests and pass on answers; left out: as many as there may be replicas.
    """

    replicas: int = 1
    max_replicas: int | None = None
    autoscaling: dict[str, Any] = field(default_factory=dict)
    num_cpus: float = 1.0
    num_gpus: float | None = None
    doors: int | None = None

    @property
    def most(self) -> int:
        """Replicas, when requests need as many as there may be."""
        return max(self.replicas, self.autoscaling.get("max_replicas", self.max_replicas) or 0)

    def counts(self, settings: ServerSettings) -> dict[str, Any]:
        """Half as many requests as are answered together: then more replicas are there before requests wait."""
        if self.max_replicas is None and not self.autoscaling:
            return {"num_replicas": self.replicas}
        bounds = {"min_replicas": self.replicas, "initial_replicas": self.replicas, "max_replicas": self.most}
        asked = {"target_ongoing_requests": max(1.0, settings.max_texts / 2)}
        return {"autoscaling_config": bounds | asked | self.autoscaling}

    def gpus(self, service: Service) -> float:
        """Ray gives an actor all of its GPUs on one machine, or waits: ranks come and go together."""
        if self.num_gpus is not None:
            return self.num_gpus
        load: dict[str, Any] = service.engine_options["load"]
        if (device := load.get("device")) is None:
            device = "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU") else "cpu"
        return 0.0 if device == "cpu" else load.get("tensor_parallel", 1)


def read_arguments(given: Mapping[str, Any]) -> tuple[Scale, Service]:
    """`serve run` gives text, a file numbers and lists."""
    graph, settings = get_type_hints(GraphConfig), get_type_hints(ServerSettings)
    own = {name: kind for name, kind in get_type_hints(service_of).items() if name not in ("load", "graph", "return")}
    kinds: dict[str, Any] = {name: graph[name] for name in GRAPH} | {"cost": str}
    kinds |= get_type_hints(Scale) | own | dict.fromkeys(LOAD, str | None) | {"tensor_parallel": int | None}
    kinds |= {name: kind for name, kind in settings.items() if name not in (*RENAMED, *OF_PROXIES)}
    values = {name: converted(name, value, kinds) for name, value in given.items()}

    def taken(names: Sequence[str]) -> dict[str, Any]:
        return {name: values.pop(name) for name in names if values.get(name) is not None}

    scale = Scale(**taken([one.name for one in fields(Scale)]))
    load, config = taken(LOAD), GraphConfig(**taken((*GRAPH, "cost")))
    values.setdefault("grace", values.get("deadline", ServerSettings.deadline))  # replicas leave often
    return scale, service_of(load, config, **values)


def converted(name: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    if name in OF_PROXIES:
        raise UsageError(f"{name} is not a replica's: Serve's proxies listen, as their http_options say")
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.5)
        raise UsageError(f"there is no argument {name}" + (f": did you mean {near[0]}?" if near else ""))
    if isinstance(value, str) and kinds[name] == list[str] | None:
        value = [value]
    try:
        found = TypeAdapter(kinds[name]).validate_python(value)
    except ValidationError as error:
        raise UsageError(f"{name} cannot be {value!r}: {error.errors()[0]['msg']}") from error
    if isinstance(found, int | float) and not 0 <= found < math.inf:
        raise UsageError(f"{name} must be a number of at least 0, not {value!r}")
    return found


# A replica


class Replica:
    """A server without a port of its own."""

    async def __init__(self, service: Service) -> None:  # type: ignore[misc]  # Serve waits for it
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._settings, self._open = service.settings, contextlib.AsyncExitStack()
        self._open.enter_context(logging_to_stderr(service.settings))
        self._name = serve.get_replica_context().replica_id.unique_id
        tokenizer = await asyncio.to_thread(served_tokenizer, service.target)
        self._engine = Engine(engine_command(service.engine_options), service.settings)
        self._app = create_app(service.settings, self._engine, tokenizer, behind_door=True)
        self._under_way: dict[Exchange, asyncio.Task[None]] = {}
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))
        while self._engine.ready is None:
            if self._engine.failed_to_start is not None:
                raise DraftGraphError(self._engine.failed_to_start)
            await asyncio.sleep(0.05)
        self._last_ready = time.monotonic()

    async def answer(self, asked: Asked) -> AsyncIterator[Taken | list[Message]]:
        """What the app sends, in batches."""
        is_away = self._engine.ready is None and not asked.is_last_try
        yield Taken(self._name, is_away)
        if is_away:
            return
        exchange = Exchange(asked.body)
        state = {"tenant": asked.tenant, "body_length": len(asked.body)}
        work = self._app(asked.scope | {"state": state}, exchange.receive, exchange.send)
        self._under_way[exchange] = task = asyncio.create_task(exchange.see_through(work))
        task.add_done_callback(lambda _: self._under_way.pop(exchange))
        try:
            while batch := await exchange.batch():
                yield batch
                await asyncio.sleep(max(PAUSE, len(self._under_way) / BATCHES))
            await task
        finally:
            exchange.is_left.set()

    def figures(self) -> Figures:
        return self._name, self._app.state.server.figures()

    def check_health(self) -> None:
        """An engine that died is started again here; one that does not come back may do so in another place."""
        if self._engine.ready is not None:
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > self._settings.silence:
            raise DraftGraphError(f"there has been no engine for {self._settings.silence:g} seconds")

    async def __del__(self) -> None:  # Serve waits for it
        await self._open.aclose()


class Exchange:
    """An app's two ends of one request."""

    def __init__(self, body: bytes) -> None:
        self.is_left = asyncio.Event()  # by the client
        self._received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive(self) -> Message:
        if self._received:
            return self._received.pop()
        await self.is_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._sent.put_nowait(message)

    async def see_through(self, work: Any) -> None:
        try:
            await work
        finally:
            self._sent.put_nowait(None)

    async def batch(self) -> list[Message]:
        """All that has been sent since the last one; nothing at the end."""
        found = [await self._sent.get()]
        while not self._sent.empty() and found[-1] is not None:
            found.append(self._sent.get_nowait())
        if found[-1] is None and len(found) > 1:
            self._sent.put_nowait(found.pop())
        return [message for message in found if message is not None]


# A door


class Door:
    """What clients reach: `door` makes its app."""

    app: FastAPI  # set by Serve

    def __init__(self, replicas: DeploymentHandle[Any]) -> None: ...

    def figures(self) -> Figures:
        """Of what no replica has answered."""
        metrics: Metrics = self.app.state.metrics
        counted = (metrics.requests, metrics.request_seconds, metrics.stream_errors)
        return serve.get_replica_context().replica_id.unique_id, [one for each in counted for one in each.collect()]


def door(settings: ServerSettings, keys: Keys) -> FastAPI:
    """Lets requests in as a server does, and passes them on."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    name = serve.get_replica_context().app_name
    replicas, doors = (serve.get_deployment_handle(one, name) for one in (REPLICA, DOOR))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with logging_to_stderr(settings):
            if keys.let_all_in:
                logger.warning("there are no API keys: everybody who can reach Serve's proxies may ask")
            watch = asyncio.create_task(follow_keys(keys, settings.key_file))
            yield
            watch.cancel()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    app.include_router(health_routes())

    @app.get("/metrics")
    async def metrics() -> Response:
        return figures_answer(labelled([*await figures_of(doors), *await figures_of(replicas)]))

    app.router.routes.append(Route("/{path:path}", PassOn(replicas)))
    errors.install(app)
    guard(app, settings, keys)
    app.state.metrics = Metrics(settings.model_name)
    app.add_middleware(Counted, metrics=app.state.metrics, adds_id=False)  # Serve's proxies add it
    return app


async def follow_keys(keys: Keys, file: str | None) -> None:
    """A file that cannot be read changes nothing."""
    seen = None
    while file is not None:
        with contextlib.suppress(OSError, UsageError):
            if (now := Path(file).expanduser().stat().st_mtime_ns) != seen:
                keys.replace(keys_of_file(Path(file)))
                seen = now
        await asyncio.sleep(KEYS_SECONDS)


async def figures_of(deployment: DeploymentHandle[Any]) -> list[Figures]:
    """Of all its replicas that tell them."""
    try:
        asked = deployment.broadcast("figures")
        found = await asked.results_async(timeout_s=FIGURES_SECONDS, return_exceptions=True)
    except (RayServeException, TimeoutError) as error:
        logger.warning("no figures of %s: %s", deployment.deployment_name, error)
        return []
    return [one for one in found if not isinstance(one, BaseException)]


class PassOn:
    """Hands a request to a replica. One that has not begun to be answered goes to another if the first fails; an answer
    that breaks off ends with an error event if it is a stream, else its connection is closed before its end."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._answer = replicas.answer.options(stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, state = (await receive())["body"], scope["state"]
        conversation = conversation_of(body, state["tenant"])
        asked = Asked(passed_on(scope), body, state["tenant"], conversation)
        for tries in reversed(range(TRIES)):
            reply = Reply(scope, send)
            taken = await self._try(replace(asked, is_last_try=not tries), reply)
            if reply.is_complete:
                return
            asked = replace(asked, avoid=asked.avoid | taken)
        raise failure("engine", "the replicas that were asked for an answer failed: try again later")

    async def _try(self, asked: Asked, reply: Reply) -> set[str]:
        """The replica that took it, if any did."""
        taken: set[str] = set()
        answer: DeploymentResponseGenerator[Any] = self._answer.remote(asked)  # type: ignore[assignment]  # as asked
        try:
            first = await in_time(anext(answer))
            taken.add(first.server)
            if not first.is_away:
                reply.taken_by(first.server)
                async for batch in answer:
                    await reply.send(batch)
        except (RayError, RayServeException) as error:
            logger.warning("replica %s failed: %s", *(taken or {"unknown"}), type(error).__name__)
            await reply.break_off(failure("engine", "the replica that answered failed: try again later"))
        finally:
            if not reply.is_complete:
                answer.cancel()
        return taken


def passed_on(scope: Scope) -> dict[str, Any]:
    """What a replica is told of a request: not its key, which the door has seen."""
    told = {name: scope[name] for name in SCOPE if name in scope}
    return told | {"headers": [one for one in scope["headers"] if one[0].lower() != b"authorization"]}


async def in_time(taken: Awaitable[Taken]) -> Taken:
    try:
        async with asyncio.timeout(PLACE_SECONDS):
            return await taken
    except TimeoutError as error:
        raise failure("engine", "no replica has taken the request: try again later") from error


class Reply:
    """What a client is sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message | None = None
        self.is_complete = False

    def taken_by(self, replica: str) -> None:
        self._scope["state"]["answered_by"] = replica

    async def send(self, batch: list[Message]) -> None:
        """Its pieces as one."""
        if self._start is None:
            [self._start, *batch] = batch
            named = [one for one in self._start["headers"] if one[0] != b"x-request-id"]
            await self._send({**self._start, "headers": named})
        if batch:
            self.is_complete = not batch[-1].get("more_body", False)
            body = b"".join(message.get("body", b"") for message in batch)
            await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_complete})

    async def break_off(self, error: ApiError) -> None:
        """The replica is gone: what it has begun ends here, and is counted here."""
        state = self._scope["state"]
        state.pop("answered_by", None)
        if self._start is None or self.is_complete:
            return
        state["error"] = error
        if not (header(self._start, b"content-type") or b"").startswith(b"text/event-stream"):
            raise ConnectionAbortedError(str(error))  # the proxy closes the connection
        event = b"event: error\n" * self._scope["path"].endswith("/responses")
        said = {"type": "error"} | error.body
        last = event + b"data: " + json_bytes(said) + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        self.is_complete = True
