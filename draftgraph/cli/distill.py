"""`draftgraph distill`: a draft for any target, in one command."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from draftgraph.cli.options import Settings
from draftgraph.cli.terminal import write_json
from draftgraph.distillation import Recipe
from draftgraph.distillation import distill as make_draft
from draftgraph.errors import UsageError

TEMPERATURES = ",".join(f"{heat:g}" for heat in Recipe().temperatures)


def distill(
    settings: Settings,
    out: str = "draft",
    prompts: list[str] | None = None,
    temperatures: str = TEMPERATURES,
    answers: str | None = None,
    batch_size: int | None = None,
    checkpoint_seconds: float = 60.0,
    bits: int = 16,
    export: str | None = None,
    **more: Any,
) -> None:
    """Train a draft model for a target, on the target's own answers."""
    done = make_draft(
        **settings.given("target", "device", "dtype"),
        out=out,
        recipe=Recipe(prompts=tuple(prompts or ()), temperatures=numbers(temperatures), **more),
        answers=answers,
        batch_size=batch_size,
        checkpoint_seconds=checkpoint_seconds,
        bits=bits,
        export=export,
    )
    if settings.json:
        write_json(asdict(done) | {"folder": str(done.folder)})


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"temperatures must be numbers with commas, such as 0,0.7, not {text!r}") from None
