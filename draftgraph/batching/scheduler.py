"""Jobs of many people: who has waited too long, and what each is told after every step."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftgraph.batching.batch import CHUNK, SEQUENCES, Batch
from draftgraph.batching.job import Finish, Job, Kind, Progress, Scores
from draftgraph.batching.requests import config_of, guide_of, request_of
from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.decoder import fresh_seed
from draftgraph.engine.adapters import Adapter
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.selfcheck import adapt
from draftgraph.errors import UsageError
from draftgraph.generation import context_window
from draftgraph.proposers.copying import Past
from draftgraph.sequence import Sequence
from draftgraph.stats import Step

if TYPE_CHECKING:
    from draftgraph.pair import Pair

LEAST_WINDOW = 2  # a token, and one that answers it


@dataclass(frozen=True)
class Limits:
    """How much is done at a time."""

    texts: int = SEQUENCES  # answered together
    slots: int | None = None  # tokens that keys and values are kept of; None: as memory allows
    chunk: int = CHUNK  # tokens of prompts that are read beside the answers of others, at most
    nodes: int = 0  # that a job may ask for, if more than the scheduler's own configuration has
    past_tokens: int = 0  # of past answers that new ones may copy from, of each tenant; 0: none
    tenants: int = 64  # whose past is kept


@dataclass(eq=False)
class Task:
    """A job under way."""

    job: Job
    sequence: Sequence
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    prompt_scores: Scores = field(default_factory=Scores)

    @property
    def late(self) -> bool:
        return self.job.deadline is not None and time.monotonic() - self.submitted > self.job.deadline


class Scheduler:
    """Answers jobs with one pair, and with adapters of its target."""

    def __init__(
        self,
        pair: Pair,
        limits: Limits | None = None,
        config: GraphConfig | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.pair, self.limits = pair, limits or Limits()
        self.config = config or pair.config
        self.batch = Batch(pair.decoder, self.limits.slots, self.limits.texts, chunk=self.limits.chunk)
        if adapters:
            adapt(self.batch.engines.target, adapters)
        self.window = self._window()
        self.vocabulary = int(pair.target.get_input_embeddings().weight.shape[0])
        self._tasks: dict[str, Task] = {}
        self._by_sequence: dict[Sequence, Task] = {}
        self._pasts: OrderedDict[str, Past] = OrderedDict()
        self._steps = 0
        self._seconds = 0.0

    def _window(self) -> int | None:
        """Tokens of a prompt and its answer: as many as the model takes and the pool has room for; None: no bound."""
        nodes = max(self.config.nodes, self.limits.nodes)
        found = [size for size in (context_window(self.pair.target), self.batch.longest(nodes)) if size is not None]
        if (window := min(found, default=None)) is not None and window < LEAST_WINDOW:
            raise UsageError(
                f"{window + nodes} slots hold no text beside {nodes} nodes: use more slots, or fewer nodes"
            )
        return window

    @property
    def busy(self) -> bool:
        return self.batch.busy

    def submit(self, job: Job) -> None:
        if job.id in self._tasks:
            raise UsageError(f"a job with the id {job.id!r} is under way")
        request = request_of(job, self.pair.target, self.pair.tokenizer, self.vocabulary)
        if self.window is not None and request.max_length > self.window:
            raise UsageError(f"{request.max_length} tokens are more than the {self.window} that there is room for")
        outputs = Outputs(keep_logprobs=job.logprobs is not None, alternatives=job.logprobs or 0)
        seed = fresh_seed() if job.seed is None else job.seed
        adapter = self.batch.engines.target.adapters.number(job.adapter)
        config, key = config_of(job, self.config), job.reuse_key
        past = self._past_of(key)
        guide = guide_of(job, self.pair.target, self.pair.tokenizer, self.vocabulary) if config.drafts else None
        sequence = Sequence(
            request,
            seed,
            config,
            sample=job.sample,
            outputs=outputs,
            tenant=job.tenant,
            reuse_key=key,
            adapter=adapter,
            past=past,
            guide=guide,
        )
        task = Task(job, sequence)
        if job.prompt_logprobs is not None:
            sequence.on_prompt = lambda logits: self._score_prompt(task, logits)
        self._tasks[job.id] = self._by_sequence[sequence] = task
        self.batch.add(sequence)

    def cancel(self, id: str) -> Progress | None:
        """Its last progress, if it is under way; its slots are free for the next step."""
        task = self._tasks.get(id)
        return None if task is None else self._ended(task, "cancelled")

    def step(self) -> list[Progress]:
        """One pass for everybody."""
        told = [self._ended(task, "deadline") for task in list(self._tasks.values()) if task.late]
        start = time.monotonic()
        taken = self.batch.step().steps
        self._steps += bool(taken)
        self._seconds += time.monotonic() - start
        for sequence, step in taken:
            if (task := self._by_sequence.get(sequence)) is not None:
                told.append(self._progress(task, step))
        for sequence in [one for one in self.batch.running if one.began]:  # nothing but their prompts was asked for
            if not self._by_sequence[sequence].job.max_tokens:
                told.append(self._ended(self._by_sequence[sequence], "length"))
        return told

    def figures(self) -> dict[str, Any]:
        batch = self.batch
        return {
            "running": len(batch.running),
            "batch_size": batch.taken.sequences,
            "waiting": len(batch.waiting),
            "slots_used": batch.engines.target.used,
            "slots_total": batch.engines.target.slots,
            "steps": self._steps,
            "seconds": self._seconds,
        }

    def _progress(self, task: Task, step: Step | None) -> Progress:
        if task.sequence.failure is not None:
            return self._failed(task, task.sequence.failure)
        assert step is not None
        now = time.monotonic()
        told = Progress(task.job.id, list(step.tokens), sources_of(step))
        outputs = task.sequence.outputs
        if outputs.keep_logprobs:
            newest = slice(len(outputs.logprobs) - len(step.tokens), None)
            told.logprobs = scores_of(outputs.logprobs[newest], outputs.best[newest])
        if task.first_token is None:
            task.first_token = now
            told.prompt_logprobs = self._prompt_scores(task)
        if task.job.trace:
            told.step = traced(step, self.batch.taken.seconds.in_all)
        if step.finish_reason is not None:
            told.finish_reason, told.stats = step.finish_reason, self._stats(task)  # type: ignore[assignment]
            if task.sequence.past is not None:
                task.sequence.past.add(task.sequence.new_tokens)
            self._forget(task)
        return told

    def _ended(self, task: Task, reason: Finish) -> Progress:
        told = Progress(task.job.id, finish_reason=reason, stats=self._stats(task))
        told.prompt_logprobs = self._prompt_scores(task) if reason == "length" else None
        self.batch.remove(task.sequence)
        self._forget(task)
        return told

    def _failed(self, task: Task, failure: Exception) -> Progress:
        told = Progress.failed(task.job.id, *described_failure(failure))
        told.stats = self._stats(task)
        self._forget(task)
        return told

    def _past_of(self, tenant: str) -> Past | None:
        """The tenant's own, and nobody else's."""
        if not self.limits.past_tokens:
            return None
        past = self._pasts.pop(tenant, None) or Past(self.limits.past_tokens)
        self._pasts[tenant] = past
        while len(self._pasts) > self.limits.tenants:
            self._pasts.popitem(last=False)
        return past

    def _forget(self, task: Task) -> None:
        self._tasks.pop(task.job.id, None)
        self._by_sequence.pop(task.sequence, None)

    def _stats(self, task: Task) -> dict[str, Any]:
        sequence, now = task.sequence, time.monotonic()
        found = sequence.stats.to_dict() if sequence.admitted is not None else {}
        first = (task.first_token or now) - task.submitted
        queue = (sequence.admitted or now) - task.submitted
        times = {"queue_seconds": queue, "first_token_seconds": first, "seconds_in_all": now - task.submitted}
        return found | times | {"reused_tokens": sequence.reused}

    def _score_prompt(self, task: Task, logits: Tensor) -> None:
        """Of a piece of the prompt: what the model thought of the tokens that follow."""
        known, prompt = task.prompt_scores, task.job.tokens
        following = list(prompt[1 + len(known) : 1 + len(known) + len(logits)])
        found = torch.log_softmax(logits.float(), dim=-1)
        best = found.topk(min(task.job.prompt_logprobs or 0, self.vocabulary))
        known.alternatives = best.values.shape[1]
        known.own.extend(found[range(len(following)), following].tolist())
        known.tokens.extend(best.indices.flatten().tolist())
        known.best.extend(best.values.flatten().tolist())

    def _prompt_scores(self, task: Task) -> Scores | None:
        return task.prompt_scores if task.job.prompt_logprobs is not None else None


def scores_of(logprobs: Several[float], best: Several[list[tuple[int, float]]]) -> Scores:
    found = Scores(len(best[0]) if best else 0, array("f", logprobs))
    for place in best:
        found.tokens.extend(token for token, _ in place)
        found.best.extend(logprob for _, logprob in place)
    return found


def described_failure(failure: Exception) -> tuple[Kind, str]:
    message = (str(failure).strip() or type(failure).__name__).splitlines()[0]
    if isinstance(failure, OutOfPages | torch.OutOfMemoryError):
        return "memory", "there is no memory left for this request: try again later"
    if isinstance(failure, UsageError):
        return "usage", message
    return "engine", f"{type(failure).__name__}: {message}"


def sources_of(step: Step) -> list[str]:
    found = [step.tree.sources[node] for node in step.path]
    return [*found, *(["target"] * (len(step.tokens) - len(found)))]


def traced(step: Step, seconds: float) -> dict[str, Any]:
    """A step's tree, for a picture."""
    tree, accepted = step.tree, {0, *step.path}
    first: dict[int, int] = {}
    merges = []
    for place, node in enumerate(map(int, tree.nodes)):
        here = step.graph.canonical[node]
        if here in first:
            merges.append([first[here], place])
        first.setdefault(here, place)
    names = ("token", "parent", "depth", "source", "score")
    numbers = (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), tree.sources, tree.scores.tolist())
    rows = enumerate(zip(*numbers, strict=True))
    nodes = [dict(zip(names, row, strict=True)) | {"accepted": place in accepted} for place, row in rows]
    return {"position": step.position, "nodes": nodes, "merges": merges, "tokens": step.tokens, "seconds": seconds}
