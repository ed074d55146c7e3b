"""Text in from arguments and stdin, text out to stdout; everything that is not the answer goes to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Column, Table

from draftgraph.cli.errors import complain
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from draftgraph.cli.options import Settings
    from draftgraph.pair import Pair

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
