"""Replicas on Ray: which one a conversation goes to, what a door does when one fails, and a small cluster's life."""

import asyncio
import contextlib
import itertools
import json
import pickle
import runpy
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import ray
from conftest import REPOSITORY
from fastapi import FastAPI
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.config import RequestRouterConfig
from starlette.routing import Route

from draftgraph.errors import UsageError
from draftgraph.serve import errors
from draftgraph.serve.app import guard
from draftgraph.serve.conversations import Asked, Taken, conversation_of, preferred
from draftgraph.serve.guard import Counted
from draftgraph.serve.metrics import Metrics, labelled, written
from draftgraph.serve.ray import Exchange, PassOn, Scale, app, read_arguments
from draftgraph.serve.ray_router import ConversationRouter
from draftgraph.serve.settings import Keys, ServerSettings

# Which replica


def chat(*contents: str, **more: Any) -> bytes:
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return json.dumps({"model": "m", "messages": messages} | more).encode()


def test_all_turns_of_a_conversation_have_one_name():
    first = conversation_of(chat("be brief", "hello"), "anna")
    assert first == conversation_of(chat("be brief", "hello", "hi", "and now?", temperature=0), "anna")
    others = [chat("be brief", "hullo"), chat("be long", "hello"), chat("be brief")]
    assert len({first, *(conversation_of(other, "anna") for other in others)}) == 4
    assert first != conversation_of(chat("be brief", "hello"), "bob")  # whose pages are others


def test_prompts_and_responses_are_named_by_their_beginning():
    def named(**body: Any) -> bytes | None:
        return conversation_of(json.dumps(body).encode(), "")

    long = "the cat sat on the mat " * 40
    assert named(prompt=long) == named(prompt=long + "and more", max_tokens=4) == named(prompt=[long, "other"])
    assert named(prompt=long) != named(prompt="a" + long)
    assert named(prompt=list(range(100))) == named(prompt=[list(range(200))])
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    assert named(input=turn, instructions="x") == named(input=turn[:1], instructions="x") != named(input=turn)
    assert named(input="hello") is not None


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"{}", b'{"messages": []}', b'{"prompt": 7}', b"[" * 300000])
def test_what_is_no_conversation_has_no_name(body):
    assert conversation_of(body, "") is None


def test_a_replica_that_leaves_moves_its_own_conversations_and_no_others():
    idle = dict.fromkeys("abcd", 0)
    names = [conversation_of(chat("", str(number)), "") for number in range(400)]
    before = {name: preferred(name, idle, 1) for name in names}
    assert all(count > 60 for count in Counter(before.values()).values())
    del idle["c"]
    moved = [name for name in names if preferred(name, idle, 1) != before[name]]
    assert moved and all(before[name] == "c" for name in moved)


def test_a_conversation_leaves_a_replica_that_is_much_busier_than_another():
    name = conversation_of(chat("", "hello"), "")
    own = preferred(name, dict.fromkeys("abc", 5), 3)
    assert preferred(name, dict.fromkeys("abc", 5) | {own: 8}, 3) == own
    second = preferred(name, dict.fromkeys("abc", 5) | {own: 9}, 3)
    assert second != own and preferred(name, {"a": 9, "b": 9, "c": 9} | {second: 5}, 3) == second


class Offline(RequestRouterConfig(request_router_class=ConversationRouter).get_request_router_class()):
    """The router as Serve copies it, without Serve."""

    def __init__(self, queues: dict[str, int]) -> None:
        self.queues = queues
        self.initialize_state(slack=2)

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda id: self.queues.get(id.unique_id))

    def offers(self, asked: Any) -> list[list[str]]:
        pending = SimpleNamespace(args=[asked], routing_context=SimpleNamespace(should_backoff=False))
        replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
        ranks = asyncio.run(self.choose_replicas(replicas, pending))
        return [[one.replica_id.unique_id for one in rank] for rank in ranks]


def test_the_router_offers_a_conversations_replica_first_and_others_after_it():
    asked = Asked({}, b"", "", b"conversation")
    (own,), drawn = Offline({}).offers(asked)
    assert len(drawn) == 2
    assert Offline({own: 2}).offers(asked)[0] == [own] != Offline({own: 3}).offers(asked)[0]
    elsewhere = Offline({}).offers(replace(asked, avoid=frozenset(own)))
    assert own not in [name for rank in elsewhere for name in rank]
    assert Offline({}).offers(replace(asked, avoid=frozenset("abc")))[0] == [own]  # all have failed: once more
    assert {len(Offline({}).offers(replace(asked, conversation=None))) for _ in range(9)} == {1}


# What an application is made of


def test_arguments_are_options_by_their_names_as_text_or_as_they_are():
    given = {"target": "org/model", "replicas": "2", "mode": "graph", "max_texts": "8", "alias": "gpt", "slots": 64}
    scale, service = read_arguments(given | {"log_prompts": "true", "num_gpus": 0.5, "deadline": 90})
    assert (scale.replicas, scale.gpus(service), service.target) == (2, 0.5, "org/model")
    settings, options = service.settings, service.engine_options
    assert settings.names == ("org/model", "gpt") and (settings.max_texts, settings.log_prompts) == (8, True)
    assert settings.grace == 90  # a replica that leaves ends what it has begun
    assert options["limits"]["slots"] == 64 and options["graph"]["mode"] == "graph" and options["graph"]["k"] == 4
    assert options["load"] == {"target": "org/model"} and json.loads(json.dumps(options)) == options
    assert read_arguments({"deadline": 90, "grace": 5})[1].settings.grace == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"port": 80}, "http_options"),
        ({"replica": 2}, "did you mean replicas"),
        ({"max_texts": "many"}, "max_texts"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"deadline": "inf"}, "deadline"),
        ({"api_keys": ["secret"]}, "api_keys"),
        ({"mode": "magic"}, "mode"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        app(arguments)


def test_replicas_scale_where_they_are_asked_to():
    settings = ServerSettings(max_texts=8)
    assert Scale(replicas=3).counts(settings) == {"num_replicas": 3}
    found = Scale(max_replicas=4, autoscaling={"upscale_delay_s": 1}).counts(settings)["autoscaling_config"]
    assert (found["min_replicas"], found["max_replicas"], found["upscale_delay_s"]) == (1, 4, 1)
    assert found["target_ongoing_requests"] == 4


def test_there_are_doors_for_as_many_replicas_as_there_may_be():
    def doors(**arguments: Any) -> Any:
        return app(arguments)._bound_deployment.num_replicas

    assert (doors(), doors(replicas=3), doors(replicas=2, max_replicas=8)) == (1, 3, 8)
    assert doors(autoscaling={"max_replicas": 5}) == 5
    assert doors(max_replicas=8, doors=2) == 2


def test_a_replica_has_a_gpu_for_each_rank_of_its_target():
    def gpus(**load: Any) -> float:
        scale, service = read_arguments({"tensor_parallel": "4"} | load)
        assert service.engine_options["load"]["tensor_parallel"] == 4
        return scale.gpus(service)

    assert (gpus(device="cuda"), gpus(device="cpu"), gpus(num_gpus=8)) == (4, 0, 8)
    assert gpus() == 0  # there is no cluster here


def test_figures_of_all_replicas_are_told_apart_by_a_label():
    one, other = Metrics("m"), Metrics("m")
    one.count_request("/v1/completions", 200, 0.5)
    other.count_request("/v1/completions", 200, 0.5)
    other.count_request("/ready", 503, 0.5)
    text = written(labelled([("a", list(one.registry.collect())), ("b", list(other.registry.collect()))])).decode()
    assert text.count("# TYPE draftgraph_requests_total counter") == 1
    assert 'draftgraph_requests_total{replica="a",route="/v1/completions",status="200"} 1.0' in text
    assert 'draftgraph_requests_total{replica="b",route="/ready",status="503"} 1.0' in text


# A door


@dataclass
class FakeReplicas:
    """Replicas that follow a script: what each call answers with, in the order of calls."""

    script: list[list[Any]]
    asked: list[Asked] = field(default_factory=list)

    @property
    def answer(self) -> Any:
        return SimpleNamespace(options=lambda stream: SimpleNamespace(remote=self.remote))

    def remote(self, asked: Asked) -> Any:
        self.asked.append(asked)
        return FakeAnswer(self.script[len(self.asked) - 1])


class FakeAnswer:
    def __init__(self, items: list[Any]) -> None:
        self._items = iter(items)

    def __aiter__(self) -> "FakeAnswer":
        return self

    async def __anext__(self) -> Any:
        item = next(self._items, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, float):
            await asyncio.sleep(item)
            return await anext(self)
        return item

    def cancel(self) -> None: ...


def started(kind: str = "text/event-stream") -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]}


def piece(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


TOKEN = 'data: {"id": "1", "object": "text_completion", "choices": [{"index": 0, "text": "cat"}]}\n\n'
WHOLE = [started("application/json"), piece('{"choices": [{"index": 0, "text": "cat"}]}', more=False)]


class FakeDoor:
    """The way of a request up to the replicas, as `door` builds it."""

    def __init__(self, *script: list[Any], keys: tuple[str, ...] = ()) -> None:
        self.replicas, self.metrics = FakeReplicas(list(script)), Metrics("m")
        self.app = FastAPI()
        self.app.router.routes.append(Route("/{path:path}", PassOn(self.replicas)))
        errors.install(self.app)
        guard(self.app, ServerSettings(max_body=1000), Keys(keys))
        self.app.add_middleware(Counted, metrics=self.metrics, adds_id=False)
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def post(self, **body: Any) -> httpx.Response:
        return asyncio.run(self.http.post("/v1/completions", json=body))

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=self.http, max_retries=0)

    async def stream(self) -> list[str]:
        async with await self.client.completions.create(model="m", prompt="the", stream=True) as stream:
            return [chunk.choices[0].text async for chunk in stream]

    def counted(self) -> dict[str, float]:
        text = written(self.metrics.requests.collect()).decode()
        lines = [line for line in text.splitlines() if line.startswith("draftgraph_requests_total")]
        return {line.split('status="')[1][:3]: float(line.split()[-1]) for line in lines}


def test_what_a_replica_answers_is_passed_on_and_counted_there_alone():
    door = FakeDoor([Taken("a", False), [started(), piece(TOKEN)], [piece(TOKEN), piece("data: [DONE]\n\n", False)]])
    assert asyncio.run(door.stream()) == ["cat", "cat"]
    (asked,) = door.replicas.asked
    assert json.loads(asked.body)["prompt"] == "the" and asked.conversation and asked.scope["method"] == "POST"
    assert door.counted() == {}


def test_a_request_that_has_not_begun_goes_to_another_replica():
    died = ActorDiedError()
    door = FakeDoor([Taken("a", False), died], [Taken("b", True)], [Taken("c", False), WHOLE])
    assert door.post(prompt="the").json()["choices"][0]["text"] == "cat"
    assert [sorted(asked.avoid) for asked in door.replicas.asked] == [[], ["a"], ["a", "b"]]
    assert [asked.is_last_try for asked in door.replicas.asked] == [False, False, True]


def test_a_request_that_no_replica_answers_gets_an_error():
    died = ActorDiedError()
    door = FakeDoor(*[[Taken(name, False), died] for name in "abc"])
    answer = door.post(prompt="the")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "engine_unavailable" and door.counted() == {"503": 1}


def test_a_request_that_no_replica_takes_is_told_so_in_time(monkeypatch):
    monkeypatch.setattr("draftgraph.serve.ray.PLACE_SECONDS", 0.05)
    answer = FakeDoor([60.0]).post(prompt="the")
    assert answer.status_code == 503 and "retry-after" in answer.headers


def test_a_stream_whose_replica_dies_ends_with_an_error_event():
    door = FakeDoor([Taken("a", False), [started(), piece(TOKEN)], ActorDiedError()])
    with pytest.raises(openai.APIError, match="the replica that answered failed"):
        asyncio.run(door.stream())
    assert len(door.replicas.asked) == 1 and door.counted() == {"503": 1}


def test_a_stream_of_a_response_ends_so_too():
    door = FakeDoor([Taken("a", False), [started()], ActorDiedError()])

    async def ask() -> None:
        async with await door.client.responses.create(model="m", input="the", stream=True) as stream:
            async for event in stream:
                assert event.type == "error"

    with pytest.raises(openai.APIError, match="the replica that answered failed"):
        asyncio.run(ask())


def test_a_whole_answer_that_breaks_off_is_no_answer():
    door = FakeDoor([Taken("a", False), [started("application/json"), piece('{"choices"')], ActorDiedError()])
    with pytest.raises(ConnectionAbortedError):
        door.post(prompt="the")


def test_a_door_refuses_wrong_keys_and_long_bodies_itself():
    door = FakeDoor(keys=("key",))
    assert door.post(prompt="the").status_code == 401
    door.http.headers["Authorization"] = "Bearer key"
    assert door.post(prompt="the" * 1000).status_code == 413
    assert door.counted() == {"401": 1, "413": 1} and not door.replicas.asked


def test_a_key_goes_no_further_than_to_the_door():
    door = FakeDoor([Taken("a", False), WHOLE], keys=("key-of-anna",))
    door.http.headers.update({"Authorization": "Bearer key-of-anna", "X-Session-Id": "7"})
    assert door.post(prompt="the").status_code == 200
    (asked,) = door.replicas.asked
    assert (b"x-session-id", b"7") in asked.scope["headers"] and asked.tenant
    assert b"key-of-anna" not in pickle.dumps(asked)


def test_what_an_app_sends_in_the_meantime_is_one_batch():
    async def run() -> list[list[dict[str, Any]]]:
        exchange = Exchange(b"body")

        async def app() -> None:
            assert (await exchange.receive())["body"] == b"body"
            for message in (started(), piece("a"), piece("b")):
                await exchange.send(message)
            await asyncio.sleep(0.05)
            await exchange.send(piece("c", more=False))
            exchange.is_left.set()
            assert (await exchange.receive())["type"] == "http.disconnect"

        task = asyncio.create_task(exchange.see_through(app()))
        batches = []
        while batch := await exchange.batch():
            batches.append(batch)
        await task
        return batches

    assert [len(batch) for batch in asyncio.run(run())] == [3, 1]


# A small cluster


CHAT = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }} {% endfor %}"
KEYS, CLIENTS = ["key-of-anna", "key-of-bob"], 12
PROMPTS = [f"{name}: the cat sat on a mat and saw that dog" for name in ("anna", "bob", "carl", "dora")]
SCALING = {"target_ongoing_requests": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
SCALING |= {"metrics_interval_s": 0.5, "look_back_period_s": 1.0}
OPTIONS = {"name": "tiny", "cost": "flat", "slots": 16384, "num_cpus": 0.5, "max_replicas": 2, "doors": 1}
OPTIONS |= {"autoscaling": SCALING}


@pytest.fixture
def tiny_pair(tmp_path: Path) -> dict[str, str]:
    runpy.run_path(str(REPOSITORY / "benchmarks" / "soak.py"))["save_tiny_pair"](tmp_path)
    file = tmp_path / "target" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT}))
    return {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft"), "dtype": "float64"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ray and Serve in processes of their own, all of which are gone in the end; the URL of Serve's proxy."""
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    others = psutil.Process().children(recursive=True)  # servers and interpreters of other tests
    with tempfile.TemporaryDirectory(prefix="ray") as place:  # a short path, for Ray's sockets
        try:
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=place)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            processes = [one for one in psutil.Process().children(recursive=True) if one not in others]
            serve.shutdown()
            ray.shutdown()
            _, left = psutil.wait_procs(processes, timeout=30)
            for process in left:
                process.kill()
        assert not left, left


def replicas() -> int:
    return serve.status().applications["draftgraph"].deployments["Replica"].replica_states.get("RUNNING", 0)


def a_replica() -> psutil.Process:
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.cmdline()[0].startswith("ray::ServeReplica:draftgraph:Replica") and one.children():
                return one
    raise AssertionError("there is no replica with an engine")


class Load:
    """Clients that ask again as soon as they have an answer, half of the time for a stream; what became of all that."""

    def __init__(self, url: str) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0, timeout=120)
        self.answers: dict[str, Counter[str]] = {prompt: Counter() for prompt in PROMPTS}
        self.failures: list[openai.APIError] = []
        self._clients: dict[int, asyncio.Task[None]] = {}
        self._wanted = 0

    @property
    def answered(self) -> int:
        return sum(answers.total() for answers in self.answers.values())

    def of(self, clients: int) -> None:
        """From now on; those that are too many still wait for their answers."""
        self._wanted = clients
        for number in range(clients):
            if number not in self._clients or self._clients[number].done():
                self._clients[number] = asyncio.create_task(self._keep_asking(number))

    async def end(self) -> None:
        self._wanted = 0
        await asyncio.gather(*self._clients.values())

    async def _keep_asking(self, number: int) -> None:
        for turn in itertools.count(number):
            if number >= self._wanted:
                return
            prompt = PROMPTS[turn % len(PROMPTS)]
            try:
                self.answers[prompt][await self._ask(prompt, streams=bool(turn // len(PROMPTS) % 2))] += 1
            except openai.APIError as error:
                self.failures.append(error)

    async def _ask(self, prompt: str, streams: bool) -> str:
        asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        if not streams:
            return (await self.client.completions.create(**asked)).choices[0].text
        async with await self.client.completions.create(stream=True, **asked) as stream:
            chunks = [chunk.choices[0] async for chunk in stream]
        assert chunks[-1].finish_reason == "length"
        return "".join(chunk.text for chunk in chunks)

    async def until(self, holds: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
        over = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < over, f"waited too long for {what}; failures: {self.failures}"
            await asyncio.sleep(0.1)

    async def more(self, answers: int) -> None:
        enough = self.answered + answers
        await self.until(lambda: self.answered >= enough, f"{answers} answers")


async def second_turns(client: openai.AsyncOpenAI) -> int:
    """Every conversation comes back to the pages that it has; how many of their tokens were not read again."""
    found = 0
    for number in range(6):
        turns: list[Any] = [{"role": "user", "content": f"{number}: " + "the cat sat on a mat " * 6}]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        first = await client.chat.completions.create(messages=turns, **asked)
        turns += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and then?"}]
        second = await client.chat.completions.create(messages=turns, **asked)
        known = second.usage.prompt_tokens_details.cached_tokens
        assert known >= first.usage.prompt_tokens - 32, (number, first.usage, second.usage)
        found += known
    return found


def figures(url: str, name: str) -> dict[str, float]:
    """Of each replica, all labels else taken together."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEYS[0]}"}).text.splitlines():
        if line.startswith(f"draftgraph_{name}{{"):
            found[line.split('replica="')[1].split('"')[0]] += float(line.split()[-1])
    return found


async def life(url: str, keys: Path) -> Load:
    load = Load(url)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "the"}).status_code == 401
    keys.write_text("\n".join(KEYS))  # the second is new
    load.of(clients=1)
    await load.more(4)
    load.of(CLIENTS)
    await load.until(lambda: replicas() == 2, "a second replica")
    await load.more(60)
    assert not load.failures

    bob, before = load.client.with_options(api_key=KEYS[1]), sum(figures(url, "reused_prompt_tokens_total").values())
    known = await second_turns(bob)
    assert sum(figures(url, "reused_prompt_tokens_total").values()) - before >= known
    assert len(figures(url, "ready")) == 2 and len(figures(url, "requests_total")) == 3  # a door's too

    victim = a_replica()
    (engine,) = victim.children()
    victim.kill()
    await load.more(60)
    psutil.wait_procs([engine], timeout=10)
    assert not engine.is_running()
    await load.until(lambda: replicas() == 2, "the killed replica's successor")
    await load.more(60)
    broken = len(load.failures)

    load.of(clients=1)
    await load.until(lambda: replicas() == 1, "a replica to leave")
    await load.more(4)
    await load.end()
    assert len(load.failures) == broken
    return load


def test_every_request_is_answered_or_told_why_not_while_replicas_come_die_and_leave(cluster, tiny_pair, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEYS[0])
    serve.run(app(OPTIONS | tiny_pair | {"key_file": str(keys)}), name="draftgraph")
    load = asyncio.run(life(cluster, keys))
    assert load.answered >= 200
    assert [len(texts) for texts in load.answers.values()] == [1] * len(PROMPTS)  # whoever answered
    assert len(load.failures) <= CLIENTS
    assert all("the replica that answered failed" in str(error) for error in load.failures)
