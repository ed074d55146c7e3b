"""What is written beside the weights: a model card, and a plain `transformers` folder where one is wanted."""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from draftgraph import __version__, private
from draftgraph.distillation.checkpoint import Checkpoint
from draftgraph.distillation.progress import clock
from draftgraph.distillation.score import Scores
from draftgraph.distillation.texts import Text
from draftgraph.errors import UsageError
from draftgraph.models.cache import replacing
from draftgraph.models.draft_folder import ELSEWHERE, name_of
from draftgraph.models.faults import one_line, writing
from draftgraph.models.progress import quiet_transformers
from draftgraph.models.student import own_weights, student_config, text_config

if TYPE_CHECKING:
    from draftgraph.distillation.train import Training

FIGURES = "training.json"


def save_plain(student: Any, target: Any, tokenizer: Any, folder: Path) -> None:
    """A model of its own: the student's layers, the target's whole embedding and output matrix."""
    config = student_config(student.config, list(range(text_config(student.config).num_hidden_layers)))
    config.tie_word_embeddings = target.config.tie_word_embeddings
    text_config(config).tie_word_embeddings = text_config(target.config).tie_word_embeddings
    plain = private.new_model(type(target), config, target.dtype)
    own, given = own_weights(student), target.state_dict()
    plain.load_state_dict({name: own[name] if name in own else given[name] for name in plain.state_dict()})
    plain.generation_config = target.generation_config
    with writing("the exported draft", folder, ELSEWHERE), quiet_transformers():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def finished(folder: Path, checkpoint: Checkpoint, bits: int) -> dict[str, Any] | None:
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


def write_card(
    folder: Path, training: Training, texts: list[Text], before: Scores, scores: Scores, bits: int
) -> dict[str, Any]:
    """README.md for people, training.json for programs; returns what is in that."""
    recipe, target = training.recipe.shown(), name_of(training.target)
    kinds = Counter(text.kind for text in texts)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    figures = {
        "recipe": recipe,
        "made_of": training.checkpoint.made_of,
        "target": target,
        "answers": dict(kinds),
        "answer_tokens": sum(len(text.answer) for text in texts),
        "steps": training.step,
        "seconds": round(training.seconds, 1),
        "before": before.to_dict(),
        "scores": scores.to_dict(),
        "bits": bits,
        "weights": sum(weight.numel() for weight in own_weights(training.student).values()),
        "device": machine,
        "versions": {"draftgraph": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "curve": training.curve,
    }
    rows = "\n".join(f"| {kind} | {count:,} |" for kind, count in kinds.most_common())
    settings = "\n".join(f"| {name} | {value} |" for name, value in recipe.items())
    card = f"""# Draft for {target}

{recipe["layers"]} transformer layers for speculative decoding, distilled by draftgraph {__version__} from the target
that they draft for. Use them with it: `draftgraph.load(target, draft="this folder")`. The folder holds only these
layers ({bits} bits) and borrows the target's embedding and output matrix; the target's licence applies.

On the target's greedy answers to {scores.texts} prompts that were not learnt from, the draft's best token is the
target's in **{scores.agreement:.3f}** of cases ({before.agreement:.3f} before training); a chain of 8 gives
**{scores.tokens_per_pass:.2f}** tokens per pass of the target.

Trained for {clock(training.seconds)} ({training.step:,} steps) on {machine}, on {figures["answer_tokens"]:,} tokens:

| prompts | answers |
|---|---|
{rows}

| setting | value |
|---|---|
{settings}
"""
    with writing("the model card", folder, ELSEWHERE):
        with replacing(folder / "README.md") as file:
            file.write_text(card)
        with replacing(folder / FIGURES) as file:
            file.write_text(json.dumps(figures, indent=1) + "\n")
    return figures
