"""`draftgraph distill`: a draft for any target, in one command."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import partial
from typing import Annotated, Any

from draftgraph.cli.options import REPORTS, Settings, option
from draftgraph.cli.terminal import write_json
from draftgraph.distillation import Recipe
from draftgraph.distillation import distill as make_draft
from draftgraph.distillation.recipe import OWN_PROMPTS, STEPS
from draftgraph.errors import UsageError

DISTILL_OPTIONS = ("target", "device", "dtype", *REPORTS)
USUAL = Recipe()
TEMPERATURES = ",".join(f"{heat:g}" for heat in USUAL.temperatures)
student, data, training, result = (partial(option, panel) for panel in ("Student", "Data", "Training", "Result"))


def distill(
    settings: Settings,
    out: Annotated[str, result("Folder of the draft; a run that was killed goes on there", "DIR")] = "draft",
    layers: Annotated[int, student("Transformer layers of the draft", "N")] = USUAL.layers,
    start_from: Annotated[
        str, student("Target layers to start from", "spread|first|last|0,9,18,29")
    ] = USUAL.start_from,
    vocab_size: Annotated[int, student("Tokens that the draft can write; 0: all", "N")] = USUAL.vocab_size,
    prompts: Annotated[
        list[str] | None,
        data(
            "Where prompts come from; may be given again",
            "FILE.jsonl|python[:COUNT]|datasets:NAME",
            show_default="the target",
        ),
    ] = None,
    own_prompts: Annotated[
        int | None,
        data("Prompts that the target writes itself", "N", show_default=f"{OWN_PROMPTS}, or 0 with --prompts"),
    ] = None,
    max_prompts: Annotated[int | None, data("At most so many of each source", "N", show_default="all")] = None,
    temperatures: Annotated[str, data("Of the answers to each prompt; 0: greedy", "T,T,...")] = TEMPERATURES,
    max_new_tokens: Annotated[int, data("Tokens of an answer", "N")] = USUAL.max_new_tokens,
    max_length: Annotated[int, data("Tokens of a prompt and its answer", "N")] = USUAL.max_length,
    answers: Annotated[str | None, data("Folder where answers are kept", "DIR", show_default="in the cache")] = None,
    batch_size: Annotated[int | None, data("Texts generated at once", "N", show_default="what memory holds")] = None,
    minutes: Annotated[float | None, training("Train for so long, whatever the steps", "M")] = None,
    steps: Annotated[int | None, training("Or train for so many steps", "N", show_default=f"{STEPS}")] = None,
    batch_tokens: Annotated[int, training("Tokens in one step", "N")] = USUAL.batch_tokens,
    optimizer: Annotated[str, training("How weights are changed", "adamw|muon")] = USUAL.optimizer,
    learning_rate: Annotated[float, training("Largest learning rate", "X")] = USUAL.learning_rate,
    loss: Annotated[str, training("Sum of kl, reverse, tv and top, such as kl+0.5*tv", "SUM")] = USUAL.loss,
    prompt_share: Annotated[
        float, training("Share of a prompt's tokens that are learnt as well", "X")
    ] = USUAL.prompt_share,
    seed: Annotated[int, training("Of everything random", "N")] = USUAL.seed,
    checkpoint_seconds: Annotated[float, training("Time between two checkpoints", "S")] = 60.0,
    bits: Annotated[int, result("Of the stored weights: 8, 16 or 32", "N")] = 16,
    export: Annotated[
        str | None, result("hf: also a plain transformers folder, DIR/hf", "hf", show_default="none")
    ] = None,
) -> None:
    """Train a draft model for a target, on the target's own answers."""
    given = {name: value for name, value in locals().items() if value is not None}
    chosen = {field.name: given[field.name] for field in fields(Recipe) if field.name in given}
    chosen["temperatures"] = numbers(temperatures)
    arguments: dict[str, Any] = {
        name: given.get(name) for name in ("answers", "batch_size", "bits", "export", "checkpoint_seconds")
    }
    done = make_draft(out=out, recipe=Recipe(**chosen), **settings.given("target", "device", "dtype"), **arguments)
    if settings.json:
        write_json(asdict(done) | {"folder": str(done.folder)})


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"temperatures must be numbers with commas, such as 0,0.7, not {text!r}") from None
