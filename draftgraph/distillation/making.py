"""From a loaded target to a draft in a folder, step by step; a run that was stopped goes on where it was."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftgraph.distillation.answers import AnswerStore, mark_of_weights, questions_of
from draftgraph.distillation.checkpoint import ANSWERS, RECIPE, TARGET, Checkpoint
from draftgraph.distillation.export import finished, write_card
from draftgraph.distillation.progress import Reporter, amount, clock
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.score import Scores, score
from draftgraph.distillation.sources import gather_prompts
from draftgraph.distillation.texts import Text, digest_of, frequent_tokens, parted
from draftgraph.distillation.train import Training
from draftgraph.errors import UsageError
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.models.draft import (
    cut_student,
    layer_stack,
    lend_output_rows,
    load_draft,
    picked_layers,
    save_draft,
    save_plain,
)


@dataclass(frozen=True)
class Distilled:
    """A finished draft: where it is, and how good on answers that it did not learn from."""

    folder: Path
    scores: Scores  # as it was stored
    before: Scores  # of the student before training
    steps: int
    seconds: float  # of training
    weights: int  # that it does not borrow from its target

    @classmethod
    def of(cls, folder: Path, figures: dict[str, Any]) -> Distilled:
        scores, before = (Scores(**figures[name]) for name in ("scores", "before"))
        return cls(folder, scores, before, figures["steps"], figures["seconds"], figures["weights"])

    def __str__(self) -> str:
        return (
            f"{self.folder}: {amount(self.weights)} weights of its own, agreement {self.scores.agreement:.3f} "
            f"(before training {self.before.agreement:.3f}), chain of 8: {self.scores.tokens_per_pass:.2f} tokens per "
            f"pass; trained for {clock(self.seconds)}"
        )


def make_draft(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    folder: Path,
    kept_answers: Path,
    report: Reporter,
    *,
    batch_size: int | None,
    bits: int,
    export: str | None,
    checkpoint_seconds: float,
) -> Distilled:
    recipe = within_window(recipe, model, report)
    student = cut_student(model, picked_layers(recipe.start_from, recipe.layers, len(layer_stack(model)[1])))
    store = AnswerStore(kept_answers, mark_of_weights(model))
    made_of = {TARGET: store.target_mark, RECIPE: recipe.fingerprint()}
    checkpoint = Checkpoint(folder / "checkpoint.safetensors", made_of, recipe.shown())
    checkpoint.check()
    finished(folder, checkpoint, bits)

    texts = target_answers(recipe, model, tokenizer, store, report, batch_size)
    learnt, held_out = parted(texts)
    checkpoint = replace(checkpoint, made_of=made_of | {ANSWERS: digest_of(learnt)})
    figures = finished(folder, checkpoint, bits)
    if figures is None:
        rows, stop_ids = len(model.get_output_embeddings().weight), stop_ids_of(model)
        lend_output_rows(student, model, frequent_tokens(texts, recipe.vocab_size, rows, stop_ids))
        report.begin("training")
        before = score(student, held_out, recipe.batch_tokens)
        training = Training(model, student, learnt, held_out, recipe, checkpoint, report.training)
        if training.resume():
            report.say(f"going on from step {training.step:,}")
        training.run(checkpoint_seconds)
        save_draft(student, model, folder, bits)
        after = score(load_draft(folder, model), held_out, recipe.batch_tokens)
        figures = write_card(folder, training, texts, before, after, bits)
        checkpoint.remove()
    else:
        report.say("this draft is finished: nothing to do")
    if export == "hf":
        save_plain(load_draft(folder, model), model, tokenizer, folder / "hf")
    done = Distilled.of(folder, figures)
    report.say(str(done))
    return done


def within_window(recipe: Recipe, model: Any, report: Reporter) -> Recipe:
    """Texts no longer than the positions that the target knows."""
    window = context_window(model)
    if window is None or recipe.max_length <= window:
        return recipe
    if recipe.max_new_tokens >= window:
        raise UsageError(
            f"the target's context window holds {window} tokens: ask for fewer than {recipe.max_new_tokens} new ones, "
            f"--max-new-tokens {max(1, window // 2)} for one"
        )
    report.say(f"max_length is {window}, the target's context window")
    return replace(recipe, max_length=window)


def target_answers(
    recipe: Recipe, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None
) -> list[Text]:
    """The prompts of a recipe, answered by the target."""
    sampler = Sampler(model, stop_ids_of(model), batch_size)
    prompts = gather_prompts(recipe, model, tokenizer, store, report, batch_size)
    report.say(f"{len(prompts):,} prompts")
    questions = questions_of(prompts, tokenizer, recipe.temperatures, recipe.max_length - recipe.max_new_tokens)
    report.begin("the target answers")
    began = time.monotonic()

    def progress(done: int, total: int, speed: float | None) -> None:
        report.answers(done, total, speed, (time.monotonic() - began) * (total / done - 1))

    texts = store.answer(sampler, questions, recipe.max_new_tokens, recipe.seed, progress)
    if not any(len(text.answer) > 1 for text in texts):
        raise UsageError("the target answers nothing to these prompts: check its chat template and stop tokens")
    report.say(f"{len(texts):,} answers, {amount(sum(len(text.answer) for text in texts))} tokens")
    return texts
