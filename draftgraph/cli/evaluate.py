"""`draftgraph eval`: lm-evaluation-harness with the model `draftgraph`; its command line is left to it."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from draftgraph.cli.errors import FAILED, INTERRUPTED, WRONG_USE, complain
from draftgraph.errors import DraftGraphError, UsageError

# Nothing is parsed here, not even --help: the harness has its own.
EVAL_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


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
