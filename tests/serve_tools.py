"""For tests of the server: a scheduler that needs no model, the process that runs it, and a live server around it."""

import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from draftgraph.batching.job import Scores
from draftgraph.errors import UsageError
from draftgraph.serve.engine_process import Loop, reporting_faults

TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for turn in messages %}{% if turn.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ turn.role }}|>{{ turn.content }}<|end|>{% endfor %}"
    "{% if shout %}<|system|>shout<|end|>{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
END, USER = 0, 1
# In a prompt, each does something to the engine.
SLOW, DIE, FAULT, MEMORY, STUCK = FAULTS = ["<|slow|>", "<|die|>", "<|fault|>", "<|memory|>", "<|stuck|>"]
SLOW_ID, DIE_ID, FAULT_ID, MEMORY_ID, STUCK_ID = range(4, 9)
WINDOW = 512
SOURCES = ("draft", "merged", "copied", "recycled")
KNOWN = "the cat sat on the mat and the cat sat on"


@cache
def tokenizer() -> Any:
    """Byte-level, with a chat template; it knows a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*ROLES, *FAULTS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([KNOWN] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE)


@dataclass(frozen=True)
class FakeJob:
    """The fields of a job that the fake looks at, and the rest of them."""

    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.fields.get(name)


@dataclass
class Told:
    fields: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if value is not None}


@dataclass
class Task:
    job: FakeJob
    answer: list[int]
    steps: int = 0
    drafts: int = 0
    said: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    checked_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    submitted: float = field(default_factory=time.monotonic)


class FakeScheduler:
    """Repeats the last thing that a user said, or the prompt; sampled, says what seed, sample and place decide.

    One to four tokens a step, with a draft of four where it gives more than one; with `ignore_eos` it starts over where
    it would end.
    """

    vocabulary = 320

    def __init__(self, texts: int, faulty: bool) -> None:
        self.texts, self.faulty = texts, faulty
        self.tasks: dict[str, Task] = {}
        self.steps = self.cancelled = 0

    @property
    def busy(self) -> bool:
        return bool(self.tasks)

    def submit(self, job: FakeJob) -> None:
        if job.grammar and "refuse" in str(job.grammar):
            raise UsageError("this grammar is refused")
        self.tasks[job.id] = Task(job, answer_of(job, self.vocabulary))

    def cancel(self, id: str) -> Told | None:
        task = self.tasks.pop(id, None)
        self.cancelled += task is not None
        return None if task is None else Told({"id": id, "finish_reason": "cancelled", "stats": stats_of(task)})

    def step(self) -> list[Told]:
        self.steps += 1
        if self.faulty:
            self.do_what_prompts_ask_for()
        return [Told(self.progress(task)) for task in list(self.tasks.values())]

    def do_what_prompts_ask_for(self) -> None:
        prompts = {token for task in self.tasks.values() for token in task.job.tokens}
        if STUCK_ID in prompts:
            time.sleep(60)
        if SLOW_ID in prompts:
            time.sleep(0.05)
        if DIE_ID in prompts:
            os._exit(3)
        if FAULT_ID in prompts:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def progress(self, task: Task) -> dict[str, Any]:
        job, start = task.job, task.said
        if self.faulty and MEMORY_ID in job.tokens:
            del self.tasks[job.id]
            return failed(job.id, "memory", "there is no memory left") | {"stats": stats_of(task)}
        if job.deadline is not None and time.monotonic() - task.submitted > job.deadline:
            del self.tasks[job.id]
            return {"id": job.id, "finish_reason": "deadline", "stats": stats_of(task)}
        task.steps += 1
        tokens = task.answer[start : min(start + 1 + task.steps % 4, job.max_tokens)]
        ends = {END, *(job.stop_token_ids or [])} if not job.ignore_eos else set(job.stop_token_ids or [])
        if over := next((place for place, token in enumerate(tokens) if token in ends), None):
            tokens = tokens[: over + 1]
        elif over == 0:
            tokens = tokens[:1]
        task.said += len(tokens)
        reason = "stop" if over is not None else "length" if task.said >= job.max_tokens else None
        accepted = self.count_draft(task, tokens)
        told = {
            "id": job.id,
            "tokens": tokens,
            "sources": [*accepted, "target"] if tokens else [],
            "logprobs": None if job.logprobs is None else scored(tokens, job.logprobs),
            "finish_reason": reason,
        }
        if job.prompt_logprobs is not None and start == 0:
            told["prompt_logprobs"] = scored(job.tokens[1:], job.prompt_logprobs)
        if job.trace:
            told["step"] = traced(start, tokens, accepted)
        if reason is not None:
            told["stats"] = stats_of(task)
            del self.tasks[job.id]
        return told

    def count_draft(self, task: Task, tokens: list[int]) -> list[str]:
        """Counts the draft of a step; the sources of what was accepted of it."""
        drafted = [SOURCES[(task.steps + place) % 4] for place in range(4)] if task.steps % 4 else []
        accepted = drafted[: max(0, len(tokens) - 1)]
        task.drafts += bool(drafted)
        task.checked.update(drafted)
        task.checked_at.update(range(1, len(drafted) + 1))
        task.accepted.update(accepted)
        task.accepted_at.update(range(1, len(accepted) + 1))
        return accepted

    def figures(self) -> dict[str, Any]:
        slots = sum(len(task.job.tokens) + task.said for task in self.tasks.values())
        running = min(len(self.tasks), self.texts)
        return {
            "running": running,
            "waiting": len(self.tasks) - running,
            "batch_size": running,
            "slots_used": slots,
            "slots_total": 4096,
            "steps": self.steps,
            "cancelled": self.cancelled,
        }


def answer_of(job: FakeJob, vocabulary: int) -> list[int]:
    if job.temperature:
        noise = f"{job.seed} {job.sample} {job.tokens}"
        numbers = [hashlib.sha256(f"{noise} {place}".encode()).digest()[0] for place in range(job.max_tokens)]
        return [40 + number for number in numbers]
    said = list(job.tokens)
    if USER in said:
        said = said[len(said) - said[::-1].index(USER) :]
        said = said[: said.index(END)] if END in said else said
    said = [token for token in said if token not in range(4, 9)] or [40]
    for token, bias in (job.logit_bias or {}).items():
        if bias == 100:
            said = [int(token)] * len(said)
    once = [*said, END]
    return once * (1 + job.max_tokens // len(once))


def scored(tokens: list[int], alternatives: int) -> dict[str, Any]:
    places, others = range(len(tokens)), range(alternatives)
    best = array("i", [(tokens[place] + other) % FakeScheduler.vocabulary for place in places for other in others])
    logprobs = array("f", [-0.5 - other for _ in places for other in others])
    return Scores(alternatives, array("f", [-0.5 for _ in places]), best, logprobs).to_dict()


def traced(position: int, tokens: list[int], accepted: list[str]) -> dict[str, Any]:
    root = {"token": 40, "parent": -1, "depth": 0, "source": "root", "score": 1.0, "accepted": True}
    nodes = [
        {"token": token, "parent": place, "depth": place + 1, "source": source, "score": 0.5, "accepted": True}
        for place, (token, source) in enumerate(zip(tokens, accepted, strict=False))
    ]
    return {"position": position, "nodes": [root, *nodes], "merges": [], "tokens": tokens, "seconds": 0.001}


def stats_of(task: Task) -> dict[str, Any]:
    return {
        "steps": task.steps,
        "drafts": task.drafts,
        "new_tokens": task.said,
        "prompt_tokens": len(task.job.tokens),
        "checked_by_source": task.checked,
        "accepted_by_source": task.accepted,
        "checked_by_depth": task.checked_at,
        "accepted_by_depth": task.accepted_at,
        "queue_seconds": 0.001,
        "first_token_seconds": 0.002,
        "reused_tokens": min(2, len(task.job.tokens)),
    }


def failed(id: str, kind: str, message: str) -> dict[str, Any]:
    return {"id": id, "finish_reason": "error", "error": {"kind": kind, "message": message}}


def fake_engine(texts: int, faulty: bool, window: int, descriptor: int) -> None:
    """What `engine_process.main` does, with the fake."""
    connection = socket.socket(fileno=descriptor)
    ready = {"model": "fake", "context_window": window, "vocabulary": FakeScheduler.vocabulary, "draft": True}

    def serve() -> None:
        Loop(connection, FakeScheduler(texts, faulty), FakeJob).run(ready)

    os._exit(reporting_faults(connection, serve))


def fake_command(texts: int = 64, faulty: bool = True, window: int = WINDOW, before: str = "pass") -> list[str]:
    given = f"{texts}, {faulty}, {window}"
    code = f"{before}; import serve_tools, sys; serve_tools.fake_engine({given}, int(sys.argv[1]))"
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}"]


SERVE = f"""
import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from serve_tools import fake_command, tokenizer
from draftgraph.serve import run
from draftgraph.serve.settings import ServerSettings
import draftgraph.serve.engine as engine
class Fake(engine.Engine):
    def __init__(self, command, settings):
        super().__init__(fake_command(before=before), settings)
run.Engine = Fake
settings = {{"model_name": "fake", "port": 0, "grace": 2.0}} | json.loads((sys.argv[1:] or ["{{}}"])[0])
before = settings.pop("before", "pass")
run.run(ServerSettings(**settings), tokenizer(), {{}})
"""  # in a process of its own, which may be given settings in JSON; `before`: what its engine does first


class LiveServer:
    """A server on a free port of this machine, in a thread."""

    def __init__(self, command: list[str] | None = None, words: Any = None, **settings: Any) -> None:
        from draftgraph.serve.app import create_app
        from draftgraph.serve.engine import Engine
        from draftgraph.serve.run import server_of
        from draftgraph.serve.settings import ServerSettings

        fast = {"model_name": "fake", "restart_wait": 0.05, "port": 0, "grace": 5.0}
        self.settings = ServerSettings(**fast | settings)
        self.engine = Engine(command or fake_command(), self.settings)
        self.app = create_app(self.settings, self.engine, words or tokenizer())
        self.server = server_of(self.app, self.settings, self.engine)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        from draftgraph.serve.run import listening

        with listening(self.settings) as listener:
            self.server.run(sockets=[listener])

    def __enter__(self) -> "LiveServer":
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def wait_until_away(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == 503)

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.is_ready(), 120)

    def is_ready(self) -> bool:
        assert self.engine.failed_to_start is None, self.engine.failed_to_start
        return httpx.get(f"{self.url}/ready").status_code == 200

    def figures(self) -> dict[str, float]:
        """What /metrics says, by name and labels."""
        key = self.settings.api_keys[:1]
        headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
        lines = httpx.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def client(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 30.0} | options)


class TLSServer(LiveServer):
    """Waits until it is ready over HTTPS, and trusts its certificate."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @url.setter
    def url(self, _: str) -> None: ...

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, verify=ssl.create_default_context(cafile=self.settings.tls_cert))

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.get("/ready").status_code == 200)


def write_pair(folder: Path, name: str, password: bytes | None = None) -> dict[str, str]:
    """A self-signed certificate for this machine and its key, as settings."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(named, named, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(*form))
    return {"tls_cert": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}


def by_label(figures: dict[str, float], name: str) -> dict[str, float]:
    """Of a counter with one label."""
    start = f"draftgraph_{name}_total{{"
    return {key.split('"')[1]: value for key, value in figures.items() if key.startswith(start)}


def assert_figures_agree(figures: dict[str, float]) -> None:
    """Whatever became of the jobs: what was accepted was drafted, and all is counted from the same jobs."""
    drafted, accepted = by_label(figures, "drafted_tokens"), by_label(figures, "accepted_tokens")
    drafted_at, accepted_at = (by_label(figures, f"{what}_tokens_by_position") for what in ("drafted", "accepted"))
    tokens, passes, drafts = (
        figures.get(f"draftgraph_{name}") for name in ("new_tokens_sum", "passes_total", "drafts_total")
    )
    assert all(accepted[source] <= drafted[source] for source in accepted), (accepted, drafted)
    assert all(accepted_at[place] <= drafted_at[place] for place in accepted_at), (accepted_at, drafted_at)
    assert sum(drafted.values()) == sum(drafted_at.values()) and sum(accepted.values()) == sum(accepted_at.values())
    in_order = [accepted_at[place] for place in sorted(accepted_at, key=int)]
    assert [drafts, *in_order] == sorted([drafts, *in_order], reverse=True)
    assert drafts <= passes and drafts <= drafted_at.get("1", 0)
    by_source = by_label(figures, "tokens")
    assert sum(by_source.values()) == tokens and {**by_source, "target": 0} == {**accepted, "target": 0}
    assert by_source["target"] <= passes


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    over = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < over, "waited too long"
        time.sleep(0.01)
