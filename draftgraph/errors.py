"""What can go wrong, said in one line that tells the user what to do."""

from collections.abc import Iterator


class DraftGraphError(RuntimeError):
    """Something failed: the message is one line, fit to be shown as it is."""


class UsageError(DraftGraphError, ValueError):
    """The caller asked for something that cannot be: the message names it and what is possible."""


class UnsupportedModelError(DraftGraphError):
    """This model cannot be decoded over a token graph: the message names its class and the reason."""


class RankError(DraftGraphError):
    """One of the processes that hold a model together has ended or does not answer: the others cannot go on."""


class LoadError(DraftGraphError):
    """A model could not be found, fetched, converted or read."""


def one_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 240 characters."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= 240 else text[:239] + "…"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, the last one first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
