"""What is written beside the weights: a model card, and a plain `transformers` folder where one is wanted."""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from draftgraph import __version__
from draftgraph.distillation.progress import clock
from draftgraph.distillation.recipe import Recipe
from draftgraph.distillation.texts import Text
from draftgraph.models.draft_folder import name_of
from draftgraph.models.faults import writing
from draftgraph.models.progress import quiet_transformers
from draftgraph.models.student import own_names, student_config

if TYPE_CHECKING:
    from draftgraph.distillation import Distilled
    from draftgraph.distillation.train import Training


def save_plain(student: Any, target: Any, tokenizer: Any, folder: Path) -> None:
    """A model of its own: the student's layers, the target's whole embedding and output matrix."""
    tied = bool(target.config.get_text_config(decoder=True).tie_word_embeddings)
    config = student_config(student.config, list(range(student.config.get_text_config(decoder=True).num_hidden_layers)))
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = tied
    plain = type(target)._from_config(config)
    plain.to(dtype=target.dtype)
    own, given = set(own_names(student)), target.state_dict()
    weights = {name: value for name, value in student.state_dict().items() if name in own}
    weights |= {name: given[name] for name in plain.state_dict() if name not in own}
    plain.load_state_dict(weights)
    plain.generation_config = target.generation_config
    with writing("the exported draft", folder.parent), quiet_transformers():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_card(done: Distilled, recipe: Recipe, target: Any, training: Training, texts: list[Text], bits: int) -> None:
    """README.md for people, training.json for programs."""
    kinds = Counter(text.kind for text in texts)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    figures = {
        "recipe": recipe.to_dict(),
        "target": name_of(target),
        "answers": dict(kinds),
        "answer_tokens": sum(len(text.answer) for text in texts),
        "steps": training.step,
        "seconds": round(done.seconds, 1),
        "before": done.before.to_dict(),
        "scores": done.scores.to_dict(),
        "bits": bits,
        "device": machine,
        "versions": {"draftgraph": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "curve": training.curve,
    }
    rows = "\n".join(f"| {kind} | {count:,} |" for kind, count in kinds.most_common())
    settings = "\n".join(f"| {name} | {value} |" for name, value in recipe.to_dict().items())
    card = f"""# Draft for {name_of(target)}

{recipe.layers} transformer layers for speculative decoding, distilled by draftgraph {__version__} from the target that
they draft for. Use it with that target: `draftgraph.load(target, draft="this folder")`. It holds only its own layers
({bits} bits) and borrows the target's embedding and output matrix; the target's licence applies.

On the target's greedy answers to {done.scores.texts} prompts that it did not learn from: its best token is the target's
in **{done.scores.agreement:.3f}** of cases ({done.before.agreement:.3f} before training); a chain of 8 gives
**{done.scores.tokens_per_pass:.2f}** tokens per pass of the target.

Trained for {clock(done.seconds)} ({training.step:,} steps) on {machine}, on {figures["answer_tokens"]:,} tokens:

| prompts | answers |
|---|---|
{rows}

| setting | value |
|---|---|
{settings}
"""
    with writing("the model card", done.folder):
        (done.folder / "README.md").write_text(card)
        (done.folder / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
