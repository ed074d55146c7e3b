"""Distillation: the student learns the target's distribution at every token of the target's own answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftgraph.distillation.checkpoint import Checkpoint
from draftgraph.distillation.faults import naming_batch_tokens, uninterrupted
from draftgraph.distillation.loss import distillation_loss
from draftgraph.distillation.memory import TargetMemory
from draftgraph.distillation.progress import Moment
from draftgraph.distillation.recipe import Recipe, loss_terms
from draftgraph.distillation.score import Scores, mixed_precision, score
from draftgraph.distillation.sharedhead import SharedHead
from draftgraph.distillation.texts import Text, batch_of, epoch_of, learnt_places
from draftgraph.engine.borrowing import evaluating
from draftgraph.errors import DraftGraphError
from draftgraph.models.student import own_weights

LOOK_EVERY = 10  # steps between two looks at the loss: each waits for the device
SCORE_SECONDS = 20.0


Show = Callable[[Moment], None]


@dataclass
class Training:
    """A student on its way. `resume`, then `run`."""

    target: Any
    student: Any
    texts: list[Text]
    held_out: list[Text]
    recipe: Recipe
    checkpoint: Checkpoint
    show: Show = lambda moment: None
    curve: list[dict[str, float]] = field(default_factory=list)

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
        self.places = [learnt_places(text, self.recipe.prompt_share) for text in self.texts]
        self.head = SharedHead(self.target, self.student)
        self.terms = loss_terms(self.recipe.loss)
        self.step, self.seconds = 0, 0.0

    def run(self, checkpoint_seconds: float = 60.0) -> None:
        """Trains to the end of the recipe; Ctrl-C leaves a checkpoint."""
        started, saved, scored = time.monotonic() - self.seconds, time.monotonic(), -math.inf
        scores: Scores | None = None
        sums: list[Tensor] = []
        positions = np.array([len(places) for places in self.places])
        width = self.target.get_output_embeddings().weight.shape[1]
        self.memory = TargetMemory(positions, width, self.target.dtype, self.device)
        with self.head, evaluating(self.target), self.saved_if_interrupted():
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
                    scores = score(self.student, self.held_out, self.recipe.batch_tokens)
                    scored = time.monotonic()
                    self.curve.append({"step": self.step, "seconds": self.seconds, "loss": loss} | scores.to_dict())
                self.show(Moment(self.step, self.done(), self.seconds, loss, agreement, scores))
                if time.monotonic() - saved > checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def learn(self, rows: list[int]) -> Tensor:
        """One step on these texts; returns the summed loss, the agreement and the number of tokens."""
        batch = batch_of([self.texts[row] for row in rows], [self.places[row] for row in rows])
        tokens, places = (tensor.to(self.device, non_blocking=True) for tensor in (batch.tokens, batch.places))
        with naming_batch_tokens(self.recipe.batch_tokens):
            theirs = self.target_logits(rows, tokens, places)
            with mixed_precision(self.student):
                ours = self.head.logits(self.student, tokens, places)
            loss, agree = distillation_loss(ours, theirs, self.terms)
            (loss / len(places)).backward()
            nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
            with uninterrupted():
                self.take_step()
        return torch.stack([loss.detach(), agree.sum(), torch.tensor(len(places), device=self.device)])

    @torch.no_grad()
    def target_logits(self, rows: list[int], tokens: Tensor, places: Tensor) -> Tensor:
        known = self.memory.recall(rows)
        if known is not None:
            return self.head.of_states(known)
        logits = self.head.logits(self.target, tokens, places)
        states = self.head.states
        assert states is not None
        if self.memory.empty and not torch.equal(self.head.of_states(states[None])[0], logits):
            self.memory.give_up()  # something follows this model's head
        self.memory.keep(rows, states)
        return logits

    def take_step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def mean(self, sums: list[Tensor]) -> tuple[float, float]:
        """Loss and agreement of a token."""
        loss, agreement, count = torch.stack(sums).sum(dim=0).tolist()
        if not math.isfinite(loss):
            raise DraftGraphError(
                f"the loss is no number any more at step {self.step}: try a --learning-rate "
                f"under {self.recipe.learning_rate:g} with another --out; the last checkpoint is kept"
            )
        return loss / count, agreement / count

    def done(self) -> float:
        return self.recipe.done(self.step, self.seconds)

    def learning_rate(self) -> float:
        """Up quickly, then down to nothing in a straight line."""
        done, warmup = min(self.done(), 1.0), self.recipe.warmup
        shape = min(1.0, (done + 1e-4) / warmup) if done < warmup else (1 - done) / (1 - warmup)
        return self.recipe.learning_rate * shape

    def batches(self) -> Iterator[list[int]]:
        """Batches without end, the same in every run, from the step that was reached."""
        skip, epoch = self.step, 0
        while True:
            for rows in epoch_of(self.lengths, self.recipe.batch_tokens, self.recipe.seed + epoch):
                if skip:
                    skip -= 1
                else:
                    yield rows
            epoch += 1

    @contextmanager
    def saved_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.save()
            raise

    def save(self) -> None:
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, state in self.optimizer_states():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        self.checkpoint.write(tensors, {"step": self.step, "seconds": self.seconds, "curve": self.curve})

    def resume(self) -> bool:
        """Goes back to the last checkpoint, if there is one."""
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


def optimizers_for(recipe: Recipe, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, or AdamW for all."""
    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": parameters[0].is_cuda}
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, **settings)]
    matrices = [one for one in parameters if one.dim() == 2]
    others = [one for one in parameters if one.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(others, **settings)] if others else [])]
