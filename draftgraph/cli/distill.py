"""`draftgraph distill`: a draft for any target, in one command."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

from draftgraph.cli.options import Settings, option
from draftgraph.cli.terminal import busy, write_json
from draftgraph.errors import UsageError

DISTILL_OPTIONS = ("target", "device", "dtype", "json", "config", "debug")


def student(help: str, metavar: str) -> Any:
    return option("Student", help, metavar)


def data(help: str, metavar: str) -> Any:
    return option("Data", help, metavar)


def training(help: str, metavar: str) -> Any:
    return option("Training", help, metavar)


def distill(
    settings: Settings,
    out: Annotated[str, option("Result", "Folder of the draft; a run that was killed goes on there", "DIR")] = "draft",
    layers: Annotated[int | None, student("Transformer layers of the draft, 4", "N")] = None,
    start_from: Annotated[str | None, student("Target layers to start from", "spread|first|last|0,9,18,29")] = None,
    vocab_size: Annotated[int | None, student("Tokens that the draft can write, 12288; 0: all", "N")] = None,
    prompts: Annotated[
        list[str] | None, data("Where prompts come from; may be given again", "FILE.jsonl|python|datasets:NAME")
    ] = None,
    own_prompts: Annotated[int | None, data("Prompts that the target writes itself, 20000", "N")] = None,
    max_prompts: Annotated[int | None, data("At most so many of each source", "N")] = None,
    temperatures: Annotated[str | None, data("Of the answers to each prompt: 0,0.7", "T,T,...")] = None,
    max_new_tokens: Annotated[int | None, data("Tokens of an answer, 192", "N")] = None,
    max_length: Annotated[int | None, data("Tokens of a prompt and its answer, 1536", "N")] = None,
    answers: Annotated[str | None, data("Folder where answers are kept, else the cache", "DIR")] = None,
    batch_size: Annotated[int | None, data("Texts generated at once; left out: what memory holds", "N")] = None,
    minutes: Annotated[float | None, training("Train for so long", "M")] = None,
    steps: Annotated[int | None, training("Or for so many steps, 4000", "N")] = None,
    batch_tokens: Annotated[int | None, training("Tokens in one step, 32768", "N")] = None,
    optimizer: Annotated[str | None, training("How weights are changed", "adamw|muon")] = None,
    learning_rate: Annotated[float | None, training("Largest learning rate", "X")] = None,
    loss: Annotated[str | None, training("Sum of kl, reverse, tv and top, such as kl+0.5*tv", "SUM")] = None,
    prompt_share: Annotated[float | None, training("Share of a prompt's tokens that are learnt as well", "X")] = None,
    seed: Annotated[int | None, training("Of everything random", "N")] = None,
    checkpoint_seconds: Annotated[float, training("Time between two checkpoints", "S")] = 60.0,
    bits: Annotated[int, option("Result", "Of the stored weights: 8, 16 or 32", "N")] = 16,
    export: Annotated[str | None, option("Result", "hf: also a plain transformers folder, DIR/hf", "hf")] = None,
) -> None:
    """Train a draft model for a target, on the target's own answers."""
    given = {name: value for name, value in locals().items() if value is not None}
    with busy("starting"):
        from draftgraph.distillation import Recipe, distill
    chosen = {field.name: given[field.name] for field in fields(Recipe) if field.name in given}
    if "prompts" in chosen:
        chosen["prompts"] = tuple(chosen["prompts"])
    if "temperatures" in chosen:
        chosen["temperatures"] = numbers(chosen["temperatures"])
    arguments: dict[str, Any] = {
        name: given.get(name) for name in ("answers", "batch_size", "bits", "export", "checkpoint_seconds")
    }
    done = distill(out=out, recipe=Recipe(**chosen), **settings.given("target", "device", "dtype"), **arguments)
    if settings.json:
        write_json(asdict(done) | {"folder": str(done.folder)})


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"temperatures must be numbers with commas, such as 0,0.7, not {text!r}") from None
