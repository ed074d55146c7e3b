"""The commands of `draftgraph`, put together. Nothing here imports torch: `--help` must be quick."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from draftgraph import __version__
from draftgraph.cli.bench import app as bench
from draftgraph.cli.bench import tune
from draftgraph.cli.chat import chat
from draftgraph.cli.distill import distill
from draftgraph.cli.doctor import doctor
from draftgraph.cli.generate import compare, generate, inspect
from draftgraph.cli.options import MODELS, REPORTS, SPLIT, Settings, register
from draftgraph.cli.serve import SERVE_OPTIONS, serve
from draftgraph.cli.terminal import FAILED, INTERRUPTED, WRONG_USE, complain, usage_line
from draftgraph.distillation.recipe import BLOCK_SIZE, LONG_LENGTH, OWN_PROMPTS, STEPS, Recipe
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.serve.settings import KEYS, ServerSettings

EPILOG = "Every option can also be set in the environment, --max-nodes as DRAFTGRAPH_MAX_NODES, or in a --config file."

app = typer.Typer(name="draftgraph", epilog=EPILOG, pretty_exceptions_enable=False)
for function in (generate, chat, compare):
    register(app, function)
register(app, inspect, defaults=Settings(mode="graph"))  # the paper's graphs are small
register(app, serve, only=SERVE_OPTIONS, also=ServerSettings, keys=KEYS)
only = ("target", "device", "dtype", *REPORTS)
lengths: dict[str, Any] = {"block_size": BLOCK_SIZE, "long_length": LONG_LENGTH}
register(app, distill, only=only, also=Recipe, own_prompts=OWN_PROMPTS, steps=STEPS, **lengths)
register(app, tune, only=(*MODELS, SPLIT, "k", "max_nodes", "max_depth", "seed", *REPORTS))
register(app, doctor, only=(*MODELS, SPLIT, *REPORTS))
app.add_typer(bench)


# Nothing is parsed here, not even --help: the harness has its own.
@app.command(
    "eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def evaluate(context: typer.Context) -> None:
    """Check quality with lm-evaluation-harness: takes the options of lm_eval run."""
    try:
        import_module("draftgraph.evaluation")  # registers the model
        from lm_eval.__main__ import cli_evaluate

        sys.argv = ["draftgraph eval", "run", "--model", "draftgraph", *context.args]
        cli_evaluate()
    except DraftGraphError as error:
        complain(str(error))
        raise typer.Exit(WRONG_USE if isinstance(error, UsageError) else FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"draftgraph {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def draftgraph(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Graph-structured speculative decoding: the same answer of a large language model, faster."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(WRONG_USE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # on busy cores torch's threads would spin while others wait
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another one
    try:
        status = app(arguments, prog_name="draftgraph", standalone_mode=False)
    except typer.TyperException as error:
        complain(usage_line(error, arguments))
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    return status if isinstance(status, int) else 0
