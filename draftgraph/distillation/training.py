"""Distillation: the student learns the target's distribution at every token of the target's own answers."""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from draftgraph.distillation.answers import Text, batch_of, epoch_of, learnt_positions, padded
from draftgraph.distillation.progress import Scores, TrainingState, out_of_memory_means
from draftgraph.distillation.recipe import OF_TEXTS, Recipe, loss_terms
from draftgraph.distillation.sampler import memory_for
from draftgraph.engine.borrowing import evaluating
from draftgraph.errors import DraftGraphError, UsageError, one_line
from draftgraph.files import ANOTHER_OUT, replacing, writing
from draftgraph.models.draft import own_weights

LOOK_EVERY = 10  # steps between two looks at the loss: each waits for the device
SCORE_SECONDS = 20.0
CHAIN = 8
SCORED_TOKENS = 16384  # in one batch
LOSS_ROWS = 4096  # positions whose probabilities are held at once
MEMORY_SHARE = 0.5  # of what is free on a GPU, for the target's states
CPU_BYTES = 1 << 30

TARGET, RECIPE, ANSWERS = "target", "recipe", "set of answers"  # what a training is made of
SETTINGS_NAMED = 3


@dataclass
class Training:
    """Trains a student. `resume`, then `run`."""

    target: Any
    student: Any
    texts: list[Text]
    held_out: list[Text]
    recipe: Recipe
    checkpoint: Checkpoint
    show: Callable[[TrainingState], None] = lambda state: None
    curve: list[dict[str, float]] = field(default_factory=list)
    lesson_of: Callable[[Any, Any, list[Text], Recipe], Lesson] = lambda *given: LayersLesson(*given)

    def __post_init__(self) -> None:
        self.device = self.target.get_input_embeddings().weight.device
        self.parameters: dict[str, nn.Parameter] = {}
        for name, weight in own_weights(self.student).items():
            if isinstance(weight, nn.Parameter):
                weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
                weight.requires_grad_(True)
                self.parameters[name] = weight
        self.optimizers = optimizers_for(self.recipe, list(self.parameters.values()))
        self.lengths = np.array([len(text.tokens) for text in self.texts])
        self.lesson = self.lesson_of(self.target, self.student, self.texts, self.recipe)
        self.step, self.seconds = 0, 0.0

    def run(self, checkpoint_seconds: float = 60.0) -> None:
        """Trains to the end of the recipe; Ctrl-C leaves a checkpoint."""
        started, saved, scored = time.monotonic() - self.seconds, time.monotonic(), -math.inf
        scores: Scores | None = None
        sums: list[Tensor] = []
        try:
            with self.lesson, evaluating(self.target):
                for rows in self.batches():
                    if self.done() >= 1:
                        break
                    sums.append(self.learn(rows))
                    self.seconds = time.monotonic() - started
                    if self.step % LOOK_EVERY and self.done() < 1:
                        continue
                    loss, agreement = self.mean(sums)
                    sums.clear()
                    if time.monotonic() - scored > SCORE_SECONDS:
                        scores = self.lesson.score(self.held_out)
                        scored = time.monotonic()
                        self.curve.append({"step": self.step, "seconds": self.seconds, "loss": loss} | scores.to_dict())
                    self.show(TrainingState(self.step, self.done(), self.seconds, loss, agreement, scores))
                    if time.monotonic() - saved > checkpoint_seconds:
                        self.save()
                        saved = time.monotonic()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def learn(self, rows: list[int]) -> Tensor:
        """One step on these texts; returns the summed loss, the agreement and the number of tokens."""
        with naming_batch_tokens(self.recipe.batch_tokens):
            loss, agreement, count = self.lesson.loss(rows, self.step)
            (loss / max(count, 1)).backward()
            nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
            with uninterrupted():
                for optimizer in self.optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = self.learning_rate()
                    optimizer.step()
                    optimizer.zero_grad()
                self.step += 1
        return torch.stack([loss.detach(), agreement, torch.tensor(count, device=self.device)])

    def mean(self, sums: list[Tensor]) -> tuple[float, float]:
        """Loss and agreement of a token."""
        loss, agreement, count = torch.stack(sums).sum(dim=0).tolist()
        if not math.isfinite(loss):
            raise DraftGraphError(
                f"the loss is no number any more at step {self.step}: try a --learning-rate "
                f"under {self.recipe.learning_rate:g} with another --out; the last checkpoint is kept"
            )
        return loss / max(count, 1), agreement / max(count, 1)

    def done(self) -> float:
        return self.recipe.done(self.step, self.seconds)

    def learning_rate(self) -> float:
        """A short linear warm-up, then linear decay to zero."""
        done, warmup = min(self.done(), 1.0), self.recipe.warmup
        shape = min(1.0, (done + 1e-4) / warmup) if done < warmup else (1 - done) / (1 - warmup)
        return self.recipe.learning_rate * shape

    def batches(self) -> Iterator[list[int]]:
        """Batches without end, the same in every run, from the step that was reached."""
        epochs = (
            epoch_of(self.lengths, self.recipe.batch_tokens, self.recipe.seed + epoch) for epoch in itertools.count()
        )
        return itertools.islice(itertools.chain.from_iterable(epochs), self.step, None)

    def save(self) -> None:
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, state in self.optimizer_states():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        self.checkpoint.write(tensors, {"step": self.step, "seconds": self.seconds, "curve": self.curve})

    def resume(self) -> bool:
        """Continues from the last checkpoint; False where there is none."""
        found = self.checkpoint.read()
        if found is None:
            return False
        tensors, reached = found
        self.step, self.seconds, self.curve = reached["step"], reached["seconds"], reached["curve"]
        states = dict(self.optimizer_states())
        with torch.no_grad():
            for key, value in tensors.items():
                kind, _, name = key.partition(".")
                parameter = self.parameters[name]
                if kind == "weight":
                    parameter.copy_(value)
                else:
                    states[name][kind] = value.to(parameter.device)
        return True

    def optimizer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[id(parameter)], optimizer.state[parameter]


class Lesson(Protocol):
    """What a student of one kind learns from a batch of texts; entered while it trains."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def loss(self, rows: list[int], step: int) -> tuple[Tensor, Tensor, float]:
        """The loss summed over what is learnt from these texts, the summed agreement, and how many tokens that is: both
        sums and the number by weight, where tokens have one."""

    def score(self, texts: list[Text]) -> Scores:
        """How good the student is on these texts."""


class LayersLesson:
    """A student of the target's layers learns what the target says behind every learnt position."""

    def __init__(self, target: Any, student: Any, texts: list[Text], recipe: Recipe) -> None:
        self.target, self.student, self.texts, self.recipe = target, student, texts, recipe
        self.device = target.get_input_embeddings().weight.device
        self.positions = [learnt_positions(text, recipe.prompt_share) for text in texts]
        self.head = SharedHead(target, student.get_output_embeddings())
        self.terms = loss_terms(recipe.loss)
        width = target.get_output_embeddings().weight.shape[1]
        size = sum(map(len, self.positions)) * width * target.dtype.itemsize
        # The target's last states of each text; None: they do not fit.
        self.known_states: dict[int, Tensor] | None = {} if fits(size, self.device) else None

    def __enter__(self) -> LayersLesson:
        self.head.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.head.__exit__()

    def loss(self, rows: list[int], step: int) -> tuple[Tensor, Tensor, float]:
        batch = batch_of([self.texts[row] for row in rows], [self.positions[row] for row in rows])
        tokens, positions = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        theirs = self.target_logits(rows, tokens, positions)
        with mixed_precision(self.student):
            ours = self.head.logits(self.student, tokens, positions)
        loss, agree = distillation_loss(ours, theirs, self.terms)
        return loss, agree.sum(), len(positions)

    def score(self, texts: list[Text]) -> Scores:
        return score(self.student, texts, self.recipe.batch_tokens)

    @torch.no_grad()
    def target_logits(self, rows: list[int], tokens: Tensor, positions: Tensor) -> Tensor:
        """[positions, vocabulary]; a text is read once where there is room for the target's states."""
        if (states := self.recalled(rows)) is not None:
            return self.head.of_states(states)
        logits = self.head.logits(self.target, tokens, positions)
        assert self.head.inputs is not None
        states = self.head.inputs[positions]
        if self.known_states == {} and not torch.equal(self.head.of_states(states[None])[0], logits):
            self.known_states = None  # something follows this model's head
        if self.known_states is not None:
            parts = states.split([len(self.positions[row]) for row in rows])
            self.known_states.update(zip(rows, parts, strict=True))
        return logits

    def recalled(self, rows: list[int]) -> Tensor | None:
        """The target's states at the learnt positions of these texts, one text after the other, if all are known."""
        if self.known_states is None or not self.known_states.keys() >= set(rows):
            return None
        return torch.cat([self.known_states[row] for row in rows])


def fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes of the target's states may stay in memory."""
    return size <= memory_for(device, MEMORY_SHARE, CPU_BYTES)


def optimizers_for(recipe: Recipe, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, or AdamW for all."""
    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": parameters[0].is_cuda}
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, **settings)]
    matrices = [one for one in parameters if one.dim() == 2]
    others = [one for one in parameters if one.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(others, **settings)] if others else [])]


def distillation_loss(
    student: Tensor, target: Tensor, terms: dict[str, float], weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over positions of logits [n, vocabulary], weighted or not, and where both have the same best token [n].

    With p the target's distribution over the student's vocabulary and q the student's:
    kl       sum p log p/q       the usual distillation: be likely
    reverse  sum q log q/p       be where the target is
    tv       1 - sum min(p, q)   the share that rejection sampling would refuse: be accepted
    top      -log q(argmax p)    greedy decoding accepts the target's best token only
    """
    weights = student.new_ones(len(student), dtype=torch.float32) if weights is None else weights
    loss, agree = _Distance.apply(student, target, weights, terms)  # type: ignore[no-untyped-call]
    return loss, agree


class _Distance(torch.autograd.Function):
    """The loss with a hand-written gradient: no second copy of the logits."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, target: Tensor, weights: Tensor, terms: dict[str, float]) -> Any:
        gradient = torch.empty_like(student)
        losses, agrees = [], []
        pieces = (tensor.split(LOSS_ROWS) for tensor in (student, target, weights, gradient))
        for ours, theirs, weight, into in zip(*pieces, strict=True):
            log_q, log_p = (torch.log_softmax(logits.float(), dim=-1) for logits in (ours, theirs))
            loss, slope = distance_and_slope(log_q, log_p, terms)
            into.copy_(slope * weight[:, None])
            losses.append((loss * weight).sum())
            agrees.append(log_q.argmax(dim=-1) == log_p.argmax(dim=-1))
        ctx.save_for_backward(gradient)
        agree = torch.cat(agrees)
        ctx.mark_non_differentiable(agree)
        return torch.stack(losses).sum(), agree

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, _: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(of_loss), None, None, None


def distance_and_slope(log_q: Tensor, log_p: Tensor, terms: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The distance of each row and its gradient in the student's logits."""
    q, p = log_q.exp(), log_p.exp()
    loss, slope = torch.zeros_like(log_q[:, 0]), torch.zeros_like(q)
    for name, weight in terms.items():
        if name == "kl":
            loss += weight * (p * (log_p - log_q)).sum(dim=-1)
            slope += weight * (q - p)
        elif name == "reverse":
            gap = log_q - log_p
            divergence = (q * gap).sum(dim=-1, keepdim=True)
            loss += weight * divergence[:, 0]
            slope += weight * q * (gap - divergence)
        elif name == "tv":
            short = q * (q < p)
            loss += weight * (1 - torch.minimum(p, q).sum(dim=-1))
            slope += weight * (q * short.sum(dim=-1, keepdim=True) - short)
        elif name == "top":
            best = log_p.argmax(dim=-1, keepdim=True)
            loss -= weight * log_q.gather(1, best)[:, 0]
            slope += weight * q.scatter_add(1, best, -torch.ones_like(best, dtype=q.dtype))
    return loss, slope


class SharedHead:
    """Inside, the target's output matrix is another one, and models that have it score selected positions only: logits
    are most of a step's memory."""

    def __init__(self, target: Any, head: Any) -> None:
        self.target, self._head = target, head
        self.inputs: Tensor | None = None  # [tokens, width] what the head was given last
        self._positions: Tensor | None = None

    def __enter__(self) -> SharedHead:
        self._original = self.target.get_output_embeddings()
        self._hook = self._head.register_forward_pre_hook(self._narrow)
        self.target.set_output_embeddings(self._head)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.target.set_output_embeddings(self._original)
        self.inputs = None

    def outputs(self, model: Any, tokens: Tensor, positions: Tensor, **more: Any) -> Any:
        """What a model with this head returns, its logits [1, positions, vocabulary] those at positions of the
        flattened batch."""
        self._positions = positions
        try:
            return model(input_ids=tokens, use_cache=False, return_dict=True, **more)
        finally:
            self._positions = None

    def logits(self, model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        """[positions, vocabulary]"""
        return self.outputs(model, tokens, positions).logits[0]  # type: ignore[no-any-return]

    def of_states(self, states: Tensor) -> Tensor:
        """Logits from the head's inputs: right for models that do nothing behind their head."""
        return linear(states, self._head.weight, self._head.bias)

    def _narrow(self, _: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._positions is None:
            return None
        self.inputs = arguments[0].reshape(-1, arguments[0].shape[-1])
        return (self.inputs[self._positions][None],)


def score(student: Any, texts: list[Text], batch_tokens: int = SCORED_TOKENS) -> Scores:
    """Agreement and tokens per pass; exact for chains, which continue the target's own text up to the first miss."""
    with naming_batch_tokens(batch_tokens):
        hits = hits_of(student, texts, min(batch_tokens, SCORED_TOKENS))
    return scores_of([np.broadcast_to(row, (CHAIN, len(row))) for row in hits])


def scores_of(hits: list[NDArray[np.bool_]]) -> Scores:
    """Of hits by depth and token, text by text."""
    tokens = sum(row.shape[1] for row in hits)
    steps = sum(passes(row) for row in hits)
    return Scores(sum(int(row[0].sum()) for row in hits) / max(tokens, 1), tokens / max(steps, 1), len(hits))


def hits_of(student: Any, texts: list[Text], batch_tokens: int = SCORED_TOKENS) -> list[NDArray[np.bool_]]:
    """For every token of every answer, whether the student's best token is the target's."""
    device = student.get_input_embeddings().weight.device
    token_map = getattr(student, "token_map", None)
    lengths = np.array([len(text.tokens) for text in texts])
    hits: list[NDArray[np.bool_]] = [np.zeros(0, dtype=bool) for _ in texts]
    chosen: list[Tensor] = []

    def best(_: Any, __: Any, logits: Tensor) -> Tensor:
        chosen.append(logits.argmax(dim=-1))
        return logits[:, :1]

    hook = student.get_output_embeddings().register_forward_hook(best)
    with hook, torch.no_grad(), evaluating(student):
        for rows in epoch_of(lengths, batch_tokens, 0):
            tokens = padded([texts[row] for row in rows]).to(device)
            with mixed_precision(student):
                student(input_ids=tokens, use_cache=False)
            said = chosen.pop()
            said = said if token_map is None else token_map[said]
            agrees = (said[:, :-1] == tokens[:, 1:]).cpu().numpy()
            for row, agree in zip(rows, agrees, strict=True):
                hits[row] = agree[texts[row].prompt_length - 1 : lengths[row] - 1]
    return hits


def naming_batch_tokens(tokens: int) -> AbstractContextManager[None]:
    """Running out of memory inside becomes an error that names the batch size to try."""
    advice = f"try --batch-tokens {max(16, tokens // 2)}"
    return out_of_memory_means(f"{tokens} tokens in a step of training: {advice}; the last checkpoint is kept")


def mixed_precision(student: Any) -> AbstractContextManager[None]:
    """Needed where weights in float32 follow an embedding in half precision; faster on a GPU."""
    borrowed = student.get_input_embeddings().weight
    half = borrowed.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(borrowed.device.type, torch.bfloat16, enabled=half or borrowed.is_cuda)


def passes(hits: NDArray[np.bool_]) -> int:
    """Target passes for an answer: each takes the drafted tokens up to the first miss, and one more. `hits` [depths,
    tokens]: whether the draft says a token when it stands at this depth of what is drafted.

    >>> passes(np.array([[True, True, False, True], [True, True, False, False]]))
    2
    """
    count = at = 0
    while at < hits.shape[1]:
        ahead = np.diagonal(hits, at)
        at += (len(ahead) if ahead.all() else int(np.argmin(ahead))) + 1
        count += 1
    return count


@dataclass(frozen=True)
class Checkpoint:
    """A training's state in one file, replaced as a whole: a killed run leaves the last good one."""

    file: Path
    made_of: dict[str, str]  # what must be the same for a training to go on: TARGET, RECIPE, ANSWERS
    recipe: Mapping[str, Any] = field(default_factory=dict)  # as people read it

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        described = {"state": state, "made_of": self.made_of, "recipe": self.recipe}
        metadata = {name: json.dumps(value) for name, value in described.items()}
        with writing("the checkpoint", self.file.parent, ANOTHER_OUT):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.file) as partial:
                safetensors.torch.save_file(kept, partial, metadata)

    def check(self) -> None:
        """Refuses, before any work, to go on with a training that was made of something else."""
        if self.file.exists():
            with self._opened():
                pass

    def refuse_other(self, made_of: dict[str, str], recipe: Mapping[str, Any], file: Path) -> None:
        """Refuses what a file holds if it was made of something else than this training."""
        for name, value in self.made_of.items():
            if made_of.get(name) != value:
                raise UsageError(
                    f"{file.parent} holds a training with another {name}{self.differing(name, recipe)}: choose "
                    f"another --out, or remove {file.name} there to start anew"
                )

    def differing(self, name: str, recipe: Mapping[str, Any]) -> str:
        """The settings that make the difference, as far as they are known."""
        said = [
            f"{setting} {as_text(recipe[setting])} there, {as_text(here)} here"
            for setting, here in self.recipe.items()
            if name == (ANSWERS if setting in OF_TEXTS else RECIPE) and recipe.get(setting, here) != here
        ]
        return f" ({'; '.join(said[:SETTINGS_NAMED])})" if said else ""

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The state that was written last; None where a training starts anew."""
        if not self.file.exists():
            return None
        with self._opened() as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}, json.loads(stored.metadata()["state"])  # noqa: SIM118

    def remove(self) -> None:
        """Deletes the checkpoint, and partial files of killed runs."""
        for file in (self.file, *self.file.parent.glob(".*.partial")):
            file.unlink(missing_ok=True)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            with safe_open(self.file, framework="pt") as stored:
                kept = {name: json.loads(text) for name, text in stored.metadata().items()}
                self.refuse_other(kept["made_of"], kept.get("recipe", {}), self.file)
                yield stored
        except UsageError:
            raise
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"the checkpoint {self.file} cannot be read ({one_line(error)}): remove it") from error


def as_text(value: Any) -> str:
    if value in (None, []):
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block is done."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere, none arrives
    if not in_main_thread or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    waiting: list[Any] = []
    original = signal.signal(signal.SIGINT, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, original)
        if waiting and callable(original):
            original(*waiting[0])
