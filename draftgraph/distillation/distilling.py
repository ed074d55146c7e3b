"""From a target to a draft in a folder, step by step; a run that was stopped goes on where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from draftgraph.distillation.answers import AnswerStore, mark_of_weights, questions_of
from draftgraph.distillation.checkpoint import Checkpoint
from draftgraph.distillation.export import finished, save_plain, write_card
from draftgraph.distillation.faults import claim, refuse_other_content
from draftgraph.distillation.progress import Reporter, clock
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.score import Scores, score
from draftgraph.distillation.sources import gather_prompts
from draftgraph.distillation.texts import Text, digest_of, frequent_tokens, parted
from draftgraph.distillation.train import Training
from draftgraph.errors import UsageError
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.models import load_model
from draftgraph.models.cache import cache_dir
from draftgraph.models.draft_folder import load_draft, save_draft
from draftgraph.models.student import cut_student, layer_stack, lend_output_rows, picked_layers


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
            f"{self.folder}: {self.weights / 1e6:.1f}M weights of its own, agreement {self.scores.agreement:.3f} "
            f"(before training {self.before.agreement:.3f}), chain of 8: {self.scores.tokens_per_pass:.2f} tokens per "
            f"pass; trained for {clock(self.seconds)}"
        )


def distill(
    target: Any = None,
    out: str | os.PathLike[str] = "draft",
    *,
    recipe: Recipe | None = None,
    device: Any = None,
    dtype: Any = None,
    answers: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    bits: int = 16,
    export: str | None = None,
    checkpoint_seconds: float = 60.0,
    model_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> Distilled:
    """Trains a draft for a target (a name, folder, GGUF file or module) and writes it to the folder `out`.

    How is said by a `draftgraph.distillation.Recipe`, by its fields as keywords, or by both. The target's answers are
    kept in `answers` (the cache folder if left out) for other runs, and a run that was stopped goes on where it was.
    `export="hf"` also writes a plain `transformers` folder, `out/hf`. `model_kwargs` go to `from_pretrained`.

    >>> done = draftgraph.distill("my/target", out="draft", prompts=["prompts.jsonl"], minutes=30)  # doctest: +SKIP
    >>> done.scores.agreement                                                                       # doctest: +SKIP
    0.63
    >>> pair = draftgraph.load("my/target", draft="draft")                                          # doctest: +SKIP
    """
    recipe = changed(recipe or Recipe(), settings)
    refuse_outside(bits=bits, export=export, batch_size=batch_size, checkpoint_seconds=checkpoint_seconds)
    folder, kept = Path(out).expanduser(), Path(answers).expanduser() if answers else cache_dir() / "answers"
    refuse_other_content(folder)
    claim(folder, "--out")
    claim(kept, "--answers")
    model, tokenizer = load_model(target, device=device, dtype=dtype, **(model_kwargs or {}))
    if tokenizer is None:
        raise UsageError("the target has no tokenizer: save it beside the model")
    with Reporter() as report, saying_how_to_go_on(report):
        recipe = within_window(recipe, model, report)
        student = cut_student(model, picked_layers(recipe.start_from, recipe.layers, len(layer_stack(model)[1])))
        store = AnswerStore(kept, mark_of_weights(model))
        made_of = {"target": store.target_mark, "recipe": recipe.fingerprint()}
        checkpoint = Checkpoint(folder / "checkpoint.safetensors", made_of)
        checkpoint.check()
        finished(folder, made_of, bits)

        texts = target_answers(recipe, model, tokenizer, store, report, batch_size)
        learnt, held_out = parted(texts)
        made_of = made_of | {"set of answers": digest_of(learnt)}
        checkpoint = replace(checkpoint, made_of=made_of)
        figures = finished(folder, made_of, bits)
        if figures is None:
            rows, stop_ids = len(model.get_output_embeddings().weight), stop_ids_of(model)
            lend_output_rows(student, model, frequent_tokens(texts, recipe.vocab_size, rows, stop_ids))
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


def changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    known = {field.name for field in fields(Recipe)}
    if unknown := sorted(settings.keys() - known):
        raise UsageError(
            f"distill has no setting {unknown[0]!r}: the fields of draftgraph.distillation.Recipe are its settings, "
            "and what from_pretrained takes goes into model_kwargs"
        )
    return replace(recipe, **settings)


def refuse_outside(bits: int, export: str | None, batch_size: int | None, checkpoint_seconds: float) -> None:
    if bits not in (8, 16, 32):
        raise UsageError(f"bits must be 8, 16 or 32, not {bits}")
    if export not in (None, "hf"):
        raise UsageError(f'export must be "hf" or left out, not {export!r}')
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, not {batch_size}")
    if not checkpoint_seconds >= 0:
        raise UsageError(f"checkpoint_seconds must be at least 0, not {checkpoint_seconds}")


@contextmanager
def saying_how_to_go_on(report: Reporter) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        report.say("interrupted: what was done is kept, and the same command goes on from there")
        raise


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
    began = time.monotonic()

    def progress(done: int, total: int, speed: float) -> None:
        report.answers(done, total, speed, (time.monotonic() - began) * (total / done - 1))

    texts = store.answer(sampler, questions, recipe.max_new_tokens, recipe.seed, progress)
    if not any(len(text.answer) > 1 for text in texts):
        raise UsageError("the target answers nothing to these prompts: check its chat template and stop tokens")
    report.say(f"{len(texts):,} answers, {sum(len(text.answer) for text in texts) / 1e6:.1f}M tokens")
    return texts
