"""The kinds of drafts: how a student is made, what it learns, how good it is, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftgraph.distillation.answers import Text
from draftgraph.distillation.heads import BlockLesson, StatesLesson, score_head
from draftgraph.distillation.progress import Scores
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.training import LayersLesson, Lesson, score
from draftgraph.errors import UsageError
from draftgraph.files import ANOTHER_OUT, writing
from draftgraph.models.draft import (
    cut_student,
    layer_stack,
    lend_output_rows,
    load_draft,
    own_weights,
    picked_layers,
    refuse_adapters,
    save_draft,
    text_config,
)
from draftgraph.models.heads.block import new_block_head
from draftgraph.models.heads.states import new_states_head


@dataclass(frozen=True)
class Kind:
    student: Callable[[Recipe, Any], Any]  # for a target, with its whole vocabulary
    limit_vocabulary: Callable[[Any, Any, Tensor | None], None]  # of a student and its target, to these tokens
    lesson: Callable[[Any, Any, list[Text], Recipe], Lesson]
    score: Callable[[Any, Any, list[Text], int], Scores]  # of a student and its target
    save: Callable[[Any, Any, Path, int], None]
    load: Callable[[Path, Any], Any]


def cut_layers(recipe: Recipe, target: Any) -> Any:
    return cut_student(target, picked_layers(recipe.start_from, recipe.student_layers, len(layer_stack(target)[1])))


def score_layers(student: Any, target: Any, texts: list[Text], batch_tokens: int) -> Scores:
    return score(student, texts, batch_tokens)


def states_head(recipe: Recipe, target: Any) -> Any:
    return new_head(recipe, target, new_states_head, layers=recipe.student_layers)


def block_head(recipe: Recipe, target: Any) -> Any:
    mask = text_config(target.config).vocab_size - 1
    shape = {"block_size": recipe.places, "mask_token_id": mask, "causal": recipe.sees_only_back}
    return new_head(recipe, target, new_block_head, layers=recipe.student_layers, **shape)


def new_head(recipe: Recipe, target: Any, make: Callable[..., Any], **shape: Any) -> Any:
    """A head with weights drawn by the seed; its attention takes masks."""
    refuse_adapters(target)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        try:
            head = make(target, **shape)
        except AttributeError as error:
            name = type(target).__name__
            raise UsageError(f"a head for {name} cannot be made ({error}): train --kind layers") from error
    head.set_attn_implementation("sdpa")
    return head.eval()


def limit_head(head: Any, target: Any, token_map: Tensor | None) -> None:
    lend_output_rows(head, target, token_map)
    head.config.draft_vocab_size = len(head.get_output_embeddings().weight)


def keep_vocabulary(head: Any, target: Any, token_map: Tensor | None) -> None:
    """A block is written with the target's own output matrix."""


def save_head(head: Any, target: Any, folder: Path, bits: int) -> None:
    for weight in own_weights(head).values():
        if weight.is_floating_point():
            weight.data = weight.data.to(torch.bfloat16 if bits == 16 else torch.float32)
    from draftgraph.models.heads.formats import export_head

    with writing("the draft", folder, ANOTHER_OUT):
        export_head(head, target, folder)


def load_stored_head(folder: Path, target: Any) -> Any:
    from draftgraph.models.heads.formats import load_head

    return load_head(folder, target)


KINDS = {
    "layers": Kind(cut_layers, lend_output_rows, LayersLesson, score_layers, save_draft, load_draft),
    "states": Kind(states_head, limit_head, StatesLesson, score_head, save_head, load_stored_head),
    "block": Kind(block_head, keep_vocabulary, BlockLesson, score_head, save_head, load_stored_head),
}
