"""From a loaded target to a draft in a folder, step by step; a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from draftgraph import __version__
from draftgraph.distillation.answers import (
    AnswerStore,
    Text,
    digest_of,
    frequent_tokens,
    mark_of_weights,
    questions_of,
    split_held_out,
    with_long_texts,
)
from draftgraph.distillation.kinds import KINDS
from draftgraph.distillation.progress import Distilled, Reporter, Scores, amount, clock
from draftgraph.distillation.prompts import Prompt, WrittenPrompts, own_prompts, read_prompts, shuffled_unique
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.sampler import Sampler
from draftgraph.distillation.training import ANSWERS, RECIPE, TARGET, Checkpoint, Training
from draftgraph.engine.ranks import refuse_split
from draftgraph.errors import UsageError, one_line
from draftgraph.files import ANOTHER_OUT, replacing, writing
from draftgraph.generation import context_window, stop_ids_of
from draftgraph.models.draft import load_draft, name_of, own_weights, save_plain

FIGURES = "training.json"


def make_draft(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    folder: Path,
    kept_answers: Path,
    report: Reporter,
    batch_size: int | None,
    bits: int,
    export: str | None,
    checkpoint_seconds: float,
) -> Distilled:
    refuse_split(model, "training a draft")
    recipe = within_window(recipe, model, report)
    kind = KINDS[recipe.kind]
    student = kind.student(recipe, model)
    store = AnswerStore(kept_answers, mark_of_weights(model))
    made_of = {TARGET: store.target_mark, RECIPE: recipe.fingerprint()}
    checkpoint = Checkpoint(folder / "checkpoint.safetensors", made_of, recipe.shown())
    checkpoint.check()
    finished_figures(folder, checkpoint, bits)

    texts = target_answers(recipe, model, tokenizer, store, report, batch_size)
    learnt, held_out = split_held_out(texts)
    checkpoint = replace(checkpoint, made_of=made_of | {ANSWERS: digest_of(learnt)})
    figures = finished_figures(folder, checkpoint, bits)
    if figures is None:
        rows, stop_ids = len(model.get_output_embeddings().weight), stop_ids_of(model)
        kind.limit_vocabulary(student, model, frequent_tokens(texts, recipe.vocab_size, rows, stop_ids))
        report.begin("training")
        before = kind.score(student, model, held_out, recipe.batch_tokens)
        learnt = with_long_texts(learnt, recipe.longest, recipe.seed)
        training = Training(
            model, student, learnt, held_out, recipe, checkpoint, report.training, lesson_of=kind.lesson
        )
        if training.resume():
            report.say(f"going on from step {training.step:,}")
        training.run(checkpoint_seconds)
        kind.save(student, model, folder, bits)
        after = kind.score(kind.load(folder, model), model, held_out, recipe.batch_tokens)
        figures = write_card(folder, training, texts, before, after, bits)
        checkpoint.remove()
    else:
        report.say("this draft is finished: nothing to do")
    if export == "hf":
        save_plain(load_draft(folder, model), model, tokenizer, folder / "hf")
    scores, before = (Scores.from_dict(figures[name]) for name in ("scores", "before"))
    done = Distilled(folder, scores, before, figures["steps"], figures["seconds"], figures["weights"])
    report.say(str(done))
    return done


def within_window(recipe: Recipe, model: Any, report: Reporter) -> Recipe:
    """The recipe with texts no longer than the target's context window."""
    window = context_window(model)
    if window is None:
        return recipe
    if recipe.longest > window:
        recipe = replace(recipe, long_length=window)
    if recipe.max_length <= window:
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

    def progress(done: int, total: int, tokens_per_second: float | None) -> None:
        speed = "" if tokens_per_second is None else f" · {tokens_per_second:,.0f} tokens/s"
        left = (time.monotonic() - began) * (total / done - 1)
        report.live(f"answers: {done:,} of {total:,}{speed} · {clock(left)} left")

    texts = store.answer(sampler, questions, recipe.max_new_tokens, recipe.seed, progress)
    if not any(len(text.answer) > 1 for text in texts):
        raise UsageError("the target answers nothing to these prompts: check its chat template and stop tokens")
    report.say(f"{len(texts):,} answers, {amount(sum(len(text.answer) for text in texts))} tokens")
    return texts


def gather_prompts(
    recipe: Recipe, model: Any, tokenizer: Any, store: AnswerStore, report: Reporter, batch_size: int | None = None
) -> list[Prompt]:
    """Prompts of every source, no two alike, in an order drawn by the seed."""
    prompts: list[Prompt] = []
    for source in recipe.prompts:
        report.begin(f"reading prompts: {source}")
        found = read_prompts(source, tokenizer, recipe.max_prompts, recipe.seed)
        report.say(f"{len(found):,} prompts from {source}")
        prompts += found
    written = WrittenPrompts(recipe.prompts_to_write)
    if written.wanted:
        written = own_prompts(written.wanted, recipe.seed, model, tokenizer, store, report, batch_size)
        report.say(str(written))
        prompts += written.prompts
    different = shuffled_unique(prompts, recipe.seed)
    if len(different) < 2 and len(written.prompts) < written.wanted:
        raise UsageError(f"the target writes too few prompts itself ({written.why_not_more}): give --prompts FILE")
    if len(different) < 2:
        raise UsageError("a draft needs two prompts or more to learn from: give --prompts FILE, or more --own-prompts")
    return different


def finished_figures(folder: Path, checkpoint: Checkpoint, bits: int) -> dict[str, Any] | None:
    """The figures of a draft that was finished here; refused if it was made of something else."""
    file = folder / FIGURES
    if not file.exists():
        return None
    try:
        figures: dict[str, Any] = json.loads(file.read_text())
        kept, recipe, stored_bits = dict(figures["made_of"]), dict(figures["recipe"]), figures["bits"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} cannot be read ({one_line(error)}): remove it, or choose another --out") from error
    checkpoint.refuse_other(kept, recipe, file)
    if stored_bits != bits:
        raise UsageError(f"{folder} holds this draft in {stored_bits} bits: choose another --out for {bits}")
    return figures


def described(recipe: Recipe) -> str:
    """The draft in a sentence, for its card."""
    layers = f"{recipe.student_layers} transformer layer{'s' if recipe.student_layers > 1 else ''}"
    if recipe.kind == "states":
        return f"An EAGLE-3 head of {layers}, in the speculators format, that reads the target's hidden states,"
    if recipe.kind == "block":
        how, named = ("JetSpec", "its authors'") if recipe.sees_only_back else ("DFlash", "the speculators")
        return f"A {how} head of {layers}, in {named} format, that drafts {recipe.places - 1} tokens in a pass,"
    return f"{layers} for speculative decoding,"


def write_card(
    folder: Path, training: Training, texts: list[Text], before: Scores, scores: Scores, bits: int
) -> dict[str, Any]:
    """README.md for people, training.json for programs; returns what is in that."""
    recipe, kinds = training.recipe.shown(), Counter(text.kind for text in texts)
    figures: dict[str, Any] = {
        "recipe": recipe,
        "made_of": training.checkpoint.made_of,
        "target": name_of(training.target),
        "answers": dict(kinds),
        "answer_tokens": sum(len(text.answer) for text in texts),
        "steps": training.step,
        "seconds": round(training.seconds, 1),
        "before": before.to_dict(),
        "scores": scores.to_dict(),
        "bits": bits,
        "weights": sum(weight.numel() for weight in own_weights(training.student).values()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": {"draftgraph": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "curve": training.curve,
    }
    shown = figures | {
        "what": described(training.recipe),
        "clock": clock(training.seconds),
        "kinds": "\n".join(f"| {kind} | {count:,} |" for kind, count in kinds.most_common()),
        "settings": "\n".join(f"| {name} | {value} |" for name, value in recipe.items()),
    }
    card = Path(__file__).with_name("card.md").read_text(encoding="utf-8").format_map(shown)
    with writing("the model card", folder, ANOTHER_OUT):
        with replacing(folder / "README.md") as file:
            file.write_text(card)
        with replacing(folder / FIGURES) as file:
            file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures
