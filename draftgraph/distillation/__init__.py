"""Makes a draft for a target: prompts, the target's own answers to them, a student cut from it, distillation."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgraph.distillation.answers import AnswerStore, questions_of
from draftgraph.distillation.checkpoint import Checkpoint
from draftgraph.distillation.export import save_plain, write_card
from draftgraph.distillation.progress import Reporter, clock
from draftgraph.distillation.prompts import Prompt
from draftgraph.distillation.recipe import Recipe, digest
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.score import Scores, score
from draftgraph.distillation.sources import gather_prompts
from draftgraph.distillation.texts import Text, frequent_tokens
from draftgraph.distillation.train import Training
from draftgraph.errors import UsageError
from draftgraph.generation import stop_ids_of
from draftgraph.models import load_model
from draftgraph.models.cache import cache_dir
from draftgraph.models.draft_folder import load_draft, mark_of, save_draft
from draftgraph.models.student import cut_student, layer_stack, own_names, picked_layers

__all__ = ["Distilled", "Recipe", "distill"]

HELD_OUT = 512  # prompts that are not learnt from, at most; and at most one in ten


@dataclass(frozen=True)
class Distilled:
    """A finished draft: where it is, and how good on answers that it did not learn from."""

    folder: Path
    scores: Scores  # as it was stored
    before: Scores  # of the student before training
    seconds: float  # of training


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
    **model_kwargs: Any,
) -> Distilled:
    """Trains a draft for a target and writes it to `out`, to be used as `draftgraph.load(target, draft=out)`.

    The target's answers are kept in `answers` (the cache folder if left out) for other runs, and a run that was killed
    goes on where it was. `export="hf"` also writes a plain `transformers` folder, `out/hf`.
    """
    recipe, folder = recipe or Recipe(), Path(out).expanduser()
    if bits not in (8, 16, 32):
        raise UsageError(f"bits must be 8, 16 or 32, not {bits}")
    if export not in (None, "hf"):
        raise UsageError(f'export must be "hf" or left out, not {export!r}')
    model, tokenizer = load_model(target, device=device, dtype=dtype, **model_kwargs)
    if tokenizer is None:
        raise UsageError("the target has no tokenizer: save it beside the model")
    mark = mark_text(model)
    store = AnswerStore(Path(answers).expanduser() if answers else cache_dir() / "answers", mark)
    with Reporter() as report:
        stop_ids = stop_ids_of(model)
        sampler = Sampler(model, stop_ids, batch_size)
        prompts = gather_prompts(recipe, model, tokenizer, store, report, batch_size)
        report.say(f"{len(prompts):,} prompts")
        texts = answered(prompts, recipe, sampler, tokenizer, store, report)
        learnt, held_out = parted(texts)
        report.say(f"{len(texts):,} answers, {sum(len(text.answer) for text in texts) / 1e6:.1f}M tokens")

        token_map = frequent_tokens(texts, recipe.vocab_size, len(model.get_output_embeddings().weight), stop_ids)
        picked = picked_layers(recipe.start_from, recipe.layers, len(layer_stack(model)[1]))
        student = cut_student(model, picked, token_map)
        before = score(student, held_out)
        made_of = {"target": mark, "recipe": recipe.fingerprint(), "set of answers": digest_of(learnt)}
        checkpoint = Checkpoint(folder / "checkpoint.safetensors", made_of)
        training = Training(model, student, learnt, held_out, recipe, checkpoint, report.training)
        training.run(checkpoint_seconds)

        student.to(model.dtype)
        save_draft(student, model, folder, bits)
        stored = load_draft(folder, model)
        done = Distilled(folder, score(stored, held_out), before, training.seconds)
        write_card(done, recipe, model, training, texts, bits)
        if export == "hf":
            save_plain(stored, model, tokenizer, folder / "hf")
        weights = sum(dict(stored.named_parameters())[name].numel() for name in own_names(stored))
        report.say(
            f"{folder}: {weights / 1e6:.1f}M weights of its own, agreement {done.scores.agreement:.3f} "
            f"(before training {before.agreement:.3f}), chain of 8: {done.scores.tokens_per_pass:.2f} tokens per pass; "
            f"trained for {clock(training.seconds)}"
        )
    return done


def answered(
    prompts: list[Prompt], recipe: Recipe, sampler: Sampler, tokenizer: Any, store: AnswerStore, report: Reporter
) -> list[Text]:
    longest = recipe.max_length - recipe.max_new_tokens
    questions = questions_of(prompts, tokenizer, recipe.temperatures, longest)
    began = time.monotonic()

    def progress(done: int, total: int, speed: float) -> None:
        report.answers(done, total, speed, (time.monotonic() - began) * (total / done - 1))

    texts = store.answer(sampler, questions, recipe.max_new_tokens, recipe.seed, progress)
    if not any(len(text.answer) > 1 for text in texts):
        raise UsageError("the target answers nothing to these prompts: check its chat template and stop tokens")
    return texts


def parted(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """What is learnt from, and greedy answers to prompts that are not: every answer to one prompt is on one side."""
    names = [digest(text.tokens[: text.prompt_length].tobytes()) for text in texts]
    prompts = sorted(set(names))
    apart = set(prompts[: max(1, min(HELD_OUT, len(prompts) // 10))])
    learnt = [text for text, name in zip(texts, names, strict=True) if name not in apart]
    kept: dict[str, Text] = {}
    for text, name in sorted(zip(texts, names, strict=True), key=lambda pair: pair[0].temperature):
        if name in apart:
            kept.setdefault(name, text)
    if not learnt:
        raise UsageError("one prompt is too little to learn from: give more prompts")
    return learnt, list(kept.values())


def mark_text(model: Any) -> str:
    return digest(mark_of(model).numpy().tobytes(), str(model.config.get_text_config(decoder=True).num_hidden_layers))


def digest_of(texts: list[Text]) -> str:
    return digest(*(text.tokens.tobytes() for text in texts[:: max(1, len(texts) // 1000)]), str(len(texts)))
