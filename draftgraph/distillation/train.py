"""Distillation: the student learns the target's distribution at every token of the target's own answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.distillation.checkpoint import Checkpoint
from draftgraph.distillation.faults import naming_batch_tokens
from draftgraph.distillation.loss import distillation_loss
from draftgraph.distillation.recipe import Recipe, loss_terms
from draftgraph.distillation.score import Scores, score
from draftgraph.distillation.texts import Batch, Text, batch_of, epoch_of
from draftgraph.engine.loan import evaluating
from draftgraph.models.student import own_names

LOOK_EVERY = 10  # steps between two looks at the loss: each waits for the device
SCORE_SECONDS = 20.0


@dataclass(frozen=True)
class Moment:
    """Where a training stands."""

    step: int
    done: float  # share of the training
    seconds: float
    loss: float
    agreement: float  # with the target's best token, on what is being learnt
    scores: Scores | None  # on texts that are not learnt from

    @property
    def seconds_left(self) -> float:
        return self.seconds * (1 - self.done) / self.done if self.done else 0.0


Show = Callable[[Moment], None]
Select = Callable[[Tensor | None], None]  # positions of a flattened batch; None: all


@dataclass
class Training:
    """A student on its way; `run` goes on from the last checkpoint."""

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
        own = set(own_names(self.student))
        self.parameters: dict[str, Tensor] = {}
        for name, parameter in self.student.named_parameters():
            parameter.requires_grad_(name in own)
            if name in own:
                parameter.data = parameter.data.float()
                self.parameters[name] = parameter
        self.optimizers = optimizers_for(self.recipe, list(self.parameters.values()))
        self.lengths = np.array([len(text.tokens) for text in self.texts])
        self.terms = loss_terms(self.recipe.loss)
        self.step, self.seconds = 0, 0.0

    def run(self, checkpoint_seconds: float = 60.0) -> Scores:
        """Trains to the end of the recipe and returns the scores of the finished student."""
        self.resume()
        started, saved, scored = time.monotonic() - self.seconds, time.monotonic(), 0.0
        scores: Scores | None = None
        sums: list[Tensor] = []
        with self.shared_head() as select, evaluating(self.target):
            for rows in self.batches():
                if (done := self.done()) >= 1:
                    break
                sums.append(self.learn(batch_of([self.texts[row] for row in rows], self.recipe.prompt_weight), select))
                self.step += 1
                self.seconds = time.monotonic() - started
                if self.step % LOOK_EVERY:
                    continue
                loss, agreement, count = torch.stack(sums).sum(dim=0).tolist()
                sums.clear()
                if time.monotonic() - scored > SCORE_SECONDS:
                    select(None)
                    scores, scored = score(self.student, self.held_out), time.monotonic()
                    self.curve.append(
                        {"step": self.step, "seconds": self.seconds, "loss": loss / count} | scores.to_dict()
                    )
                self.show(Moment(self.step, done, self.seconds, loss / count, agreement / count, scores))
                if time.monotonic() - saved > checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()
        return score(self.student, self.held_out)

    def learn(self, batch: Batch, select: Select) -> Tensor:
        """One step; returns the summed loss, agreement and number of the answer's tokens."""
        flat = batch.weights.reshape(-1)
        places = torch.nonzero(flat)[:, 0]
        weights = flat[places].to(self.device, non_blocking=True)
        tokens = batch.tokens.to(self.device, non_blocking=True)
        select(places.to(self.device, non_blocking=True))
        with naming_batch_tokens(self.recipe.batch_tokens):
            with torch.no_grad():
                theirs = self.target(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                ours = self.student(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
            loss, agree = distillation_loss(ours, theirs, weights, self.terms)
            (loss / float(flat.sum())).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate()
            optimizer.step()
            optimizer.zero_grad()
        answered = weights >= 1
        return torch.stack([loss.detach() * answered.sum() / weights.sum(), (agree & answered).sum(), answered.sum()])

    def done(self) -> float:
        recipe = self.recipe
        return self.step / recipe.steps if recipe.minutes is None else self.seconds / (60 * recipe.minutes)

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
    def shared_head(self) -> Iterator[Select]:
        """Inside, both models score the student's vocabulary, and only at the selected positions."""
        head, original = self.student.get_output_embeddings(), self.target.get_output_embeddings()
        places: list[Tensor] = []

        def narrow(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not places:
                return None
            hidden = arguments[0]
            return (hidden.reshape(-1, hidden.shape[-1])[places[0]][None],)

        def select(chosen: Tensor | None) -> None:
            places[:] = [] if chosen is None else [chosen]

        hook = head.register_forward_pre_hook(narrow)
        self.target.set_output_embeddings(head)
        try:
            yield select
        finally:
            hook.remove()
            self.target.set_output_embeddings(original)

    def save(self) -> None:
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, state in self.optimizer_states():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        self.checkpoint.write(tensors, {"step": self.step, "seconds": self.seconds, "curve": self.curve})

    def resume(self) -> None:
        """Goes back to the last checkpoint, if there is one."""
        found = self.checkpoint.read()
        if found is None:
            return
        tensors, state = found
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight.{name}"])
            for name, state in self.optimizer_states():
                place = self.parameters[name].device
                keys = [key.removesuffix(f".{name}") for key in tensors if key.endswith(f".{name}")]
                state.update({key: tensors[f"{key}.{name}"].to(place) for key in keys if key != "weight"})

    def optimizer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[id(parameter)], optimizer.state[parameter]


def optimizers_for(recipe: Recipe, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, or AdamW for all."""
    settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": parameters[0].is_cuda}
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, **settings)]
    matrices = [one for one in parameters if one.dim() == 2]
    others = [one for one in parameters if one.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(others, **settings)] if others else [])]
