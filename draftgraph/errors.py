"""What can go wrong, said in one line that tells the user what to do."""


class DraftGraphError(RuntimeError):
    """Something failed: the message is one line, fit to be shown as it is."""


class UsageError(DraftGraphError, ValueError):
    """The caller asked for something that cannot be: the message names it and what is possible."""


class UnsupportedModelError(DraftGraphError):
    """This model cannot be decoded over a token graph: the message names its class and the reason."""


class LoadError(DraftGraphError):
    """A model could not be found, fetched, converted or read."""
