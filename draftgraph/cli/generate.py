"""`draftgraph generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from draftgraph.cli import figures
from draftgraph.cli.options import Settings
from draftgraph.cli.terminal import busy, load_pair, read_prompt, stderr_console, write, write_json

if TYPE_CHECKING:
    from draftgraph.decoding import Decoding
    from draftgraph.pair import Pair
    from draftgraph.stats import Stats

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin")]


def generate(prompt: Prompt, settings: Settings) -> None:
    """Answer a prompt: text on stdout as it comes."""
    text = read_prompt(prompt)
    config, sampling = settings.graph_config(), settings.sampling_arguments()
    pair = load_pair(settings)
    decoding = pair.start(text, config=config, **sampling)
    if settings.json:
        decode_silently(decoding)
        write_json(pair.output(decoding).to_dict())
    else:
        write_as_it_comes(pair, decoding)
    show_figures(decoding.stats, settings.stats, decoding.prices)


def decode_silently(decoding: Decoding) -> None:
    with busy("reading the prompt") as show:
        for _ in decoding:
            show(figures.summary(decoding.stats))


def write_as_it_comes(pair: Pair, decoding: Decoding) -> None:
    """Streams the answer and ends its line. A terminal that shows no text shows figures meanwhile."""
    begun = False
    with busy("reading the prompt", wanted=not sys.stdout.isatty()) as show:
        try:
            for piece in pair.pieces(decoding):
                write(piece)
                begun = True
                show(figures.summary(decoding.stats))
        finally:
            if begun or decoding.finish_reason:
                write("\n")


def show_figures(stats: Stats, all_of_them: bool, prices: str | None = None) -> None:
    terminal = stderr_console()
    if all_of_them:
        terminal.print(figures.table(stats))
        if prices is not None:
            terminal.print(f"\nHow much to draft and check was decided by {prices} prices of passes")
    elif terminal.is_terminal:
        terminal.print(figures.summary(stats), style="dim")
