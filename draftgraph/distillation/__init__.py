"""Makes a draft for a target: prompts, the target's own answers to them, a student cut from it, distillation.

`distill` checks its arguments before anything heavy is imported.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from draftgraph.distillation.progress import Distilled, Reporter
from draftgraph.distillation.recipe import Recipe
from draftgraph.errors import UsageError
from draftgraph.files import LOCK, cache_dir, claimed, held_alone
from draftgraph.models import load_model
from draftgraph.models.load import choose_device

__all__ = ["Distilled", "Recipe", "distill"]


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

    A run that was stopped goes on where it was.

    Args:
        target: Left out: the default model.
        out: A new or an empty folder, or that of a run to go on with.
        recipe: How it is trained.
        device: Left out: a GPU if there is one.
        dtype: Of the target.
        answers: Folder where the target's answers are kept for other runs; left out: in the cache.
        batch_size: Texts that the target answers at once; left out: what memory holds.
        bits: Of the stored weights: 8, 16 or 32; 8 with kind layers only.
        export: With kind layers, `hf` also writes a plain `transformers` folder, `out/hf`.
        checkpoint_seconds: Time between two checkpoints.
        model_kwargs: Go to `from_pretrained`.
        **settings: Fields of `Recipe`, which win over those of `recipe`.

    Examples:
        >>> done = draftgraph.distill("my/target", out="draft", prompts=["prompts.jsonl"], minutes=30)  # doctest: +SKIP
        >>> done.scores.agreement  # doctest: +SKIP
        0.63
        >>> pair = draftgraph.load("my/target", draft="draft")  # doctest: +SKIP
    """
    if unknown := sorted(settings.keys() - {field.name for field in fields(Recipe)}):
        raise UsageError(
            f"distill has no setting {unknown[0]!r}: the fields of draftgraph.distillation.Recipe are its settings, "
            "and what from_pretrained takes goes into model_kwargs"
        )
    recipe = replace(recipe or Recipe(), **settings)
    if bits not in (8, 16, 32):
        raise UsageError(f"bits must be 8, 16 or 32, not {bits}")
    if export not in (None, "hf"):
        raise UsageError(f'export must be "hf" or left out, not {export!r}')
    if recipe.kind != "layers" and bits == 8:
        raise UsageError(f"a head of kind {recipe.kind} is stored in 16 or 32 bits, not in 8")
    if recipe.kind != "layers" and export is not None:
        raise UsageError(
            f"export is for kind layers: a head of kind {recipe.kind} is in a format that other engines read already"
        )
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, not {batch_size}")
    if not checkpoint_seconds >= 0:
        raise UsageError(f"checkpoint_seconds must be at least 0, not {checkpoint_seconds}")
    folder, kept = Path(out).expanduser(), Path(answers).expanduser() if answers else cache_dir() / "answers"
    report = Reporter()
    with claimed(folder, "--out"), held_alone(folder), claimed(kept, "--answers"):
        refuse_other_content(folder)
        report.say(f"loading the target {target if isinstance(target, str | os.PathLike) else ''}".rstrip())
        try:
            from draftgraph.distillation.making import make_draft

            if dtype is None and choose_device(device).type == "cpu":
                dtype = "float32"  # a student starts from plain weights
            model, tokenizer = load_model(target, device=device, dtype=dtype, **(model_kwargs or {}))
            if tokenizer is None:
                raise UsageError("the target has no tokenizer: save it beside the model")
            limits = (batch_size, bits, export, checkpoint_seconds)
            with report.live_line():
                return make_draft(recipe, model, tokenizer, folder, kept, report, *limits)
        except KeyboardInterrupt:
            report.say("interrupted: what was done is kept, and the same command goes on from there")
            raise


def refuse_other_content(folder: Path) -> None:
    """Refuses a folder that holds anything but a draft or an unfinished training."""
    if (folder / "config.json").exists():
        from draftgraph.models.draft import is_draft_folder
        from draftgraph.models.heads.formats import is_head_folder

        if not (is_draft_folder(folder) or is_head_folder(folder)):
            raise UsageError(f"--out {folder} holds a model that is no draft: name another folder")
    found = folder.iterdir() if folder.is_dir() else ()
    names = {file.name for file in found if file.suffix != ".partial" and file.name != LOCK}
    if names and not names & {"checkpoint.safetensors", "config.json", "training.json"}:
        raise UsageError(f"--out {folder} holds other files ({min(names)}): name a new or an empty folder")
