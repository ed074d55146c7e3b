"""Text in from arguments and stdin, text out to stdout; everything that is not the answer goes to stderr.

What went wrong is one line there; exit status 2 for wrong use, 1 for a failure, 130 for Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Column, Table

from draftgraph.errors import DraftGraphError, UsageError

if TYPE_CHECKING:
    from draftgraph.cli.options import Settings
    from draftgraph.pair import Pair

FAILED, WRONG_USE, INTERRUPTED, NO_READER = 1, 2, 130, 141
PACKAGE = Path(__file__).resolve().parent.parent
# A model must not move the cursor or rename the window: controls but for newline and tab are not shown.
UNSHOWN = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def console(stderr: bool = False) -> Console:
    """Shows text as it is: a path or a token may look like Rich's markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    return console(stderr=True)


def say_written(*files: object) -> None:
    stderr_console().print(f"wrote {' and '.join(map(str, files))}", soft_wrap=True)


def plain_table(*columns: Column | str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def right(header: str, style: str | None = None) -> Column:
    return Column(header, justify="right", style=style or "")


def read_prompt(prompt: str) -> str:
    """The prompt, from stdin if it is `-`."""
    text = decoded(sys.stdin.buffer.read()).removesuffix("\n") if prompt == "-" else prompt
    try:  # bytes of the command line that are no text arrive as lone surrogates
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not UTF-8 text: see its character {error.start + 1}") from error
    if not text.strip():
        raise UsageError(
            "the prompt is empty: give some text" + (" on stdin" if prompt == "-" else ", or - to read stdin")
        )
    return text


def decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from error


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text.translate(UNSHOWN) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    write(json.dumps(value, ensure_ascii=False) + "\n")


def unwritable_part(folder: Path) -> Path | None:
    """The part of a path that is there and stands in the way of writing to this folder."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return None if existing.is_dir() and os.access(existing, os.W_OK) else existing


@contextmanager
def busy(title: str, wanted: bool = True) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr at a terminal; the function given changes its title."""
    terminal = stderr_console()
    if not (wanted and terminal.is_terminal):
        yield lambda title: None
        return
    spinner = Spinner("dots", title)
    # Rich would otherwise send what is written to stdout to its own console, away from a file or pipe.
    with Live(spinner, console=terminal, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield lambda title: spinner.update(text=title)


def load_pair(settings: Settings) -> Pair:
    """The models that the settings name."""
    with busy("starting"):  # torch and transformers take seconds to import; the loader has bars of its own
        from draftgraph.pair import load
    pair = load(**settings.model_arguments())
    if settings.profile is not None:
        tell_of_profile(settings, pair)
    return pair


def tell_of_profile(settings: Settings, pair: Pair) -> None:
    """What is not as it was when the profile was found: it may be slower here, and gives the same tokens."""
    from draftgraph.bench.speed import pair_key
    from draftgraph.profile import read_profile

    if not settings.profile_setting():
        complain(f"the profile {settings.profile} is for another mode: mode {settings.mode} does without")
    elif others := read_profile(str(settings.profile)).differences(pair_key(pair)):
        complain(f"the profile {settings.profile} was found for another {' and '.join(others)}: used all the same")


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


def only_our_warnings(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
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
