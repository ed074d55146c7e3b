"""What went wrong, in one line on stderr; exit status 2 for wrong use, 1 for a failure, 130 for Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from draftgraph.errors import DraftGraphError, UsageError

FAILED, WRONG_USE, INTERRUPTED, NO_READER = 1, 2, 130, 141
PACKAGE = Path(__file__).resolve().parent.parent


def complain(line: str) -> None:
    print(f"draftgraph: {' '.join(line.split())}", file=sys.stderr, flush=True)


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turns whatever happens inside into an exit status; with `debug` also shows tracebacks and warnings."""
    try:
        with contextlib.nullcontext() if debug else quiet_libraries():
            yield
        sys.stdout.flush()
    except (typer.Exit, typer.TyperException):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        forget_stdout()
        raise typer.Exit(NO_READER) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        complain(described(error))
        raise typer.Exit(WRONG_USE if isinstance(error, UsageError) else FAILED) from None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """What libraries log or warn of is left out; warnings of this package are shown in one line."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = only_our_warnings
            yield
    finally:
        logging.disable(level)


def described(error: Exception) -> str:
    if isinstance(error, DraftGraphError):
        return str(error)
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = f": {lines[0]}" if lines else ""
    return f"{type(error).__name__}{said} (run with --debug for the traceback)"


def only_our_warnings(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
        complain(str(message))


def forget_stdout() -> None:
    """Nobody reads any more: the interpreter must not stumble over the rest of the buffer when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_line(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """A usage error of the command line, with the place where a wrong value stands if it was not typed."""
    message = error.format_message().strip().rstrip(".")
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None:
        return message
    if parameter is not None and (place := origin(context, parameter, arguments)):
        message += f" ({place})"
    return f"{message}; see {context.command_path} --help"


def origin(context: typer.Context, parameter: Any, arguments: Sequence[str]) -> str | None:
    """The environment variable or file that gave a parameter its value; None if it was typed."""
    typed = [argument.split("=")[0] for argument in arguments]
    if any(name in typed for name in parameter.opts):
        return None
    if isinstance(parameter.envvar, str) and os.environ.get(parameter.envvar):
        return f"from the environment: {parameter.envvar}"
    if parameter.name in (context.default_map or {}):
        return f"from the file {context.params.get('config')}"
    return None
