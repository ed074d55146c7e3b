"""The command line: `draftgraph generate`, `chat`, `compare`, `inspect`, `doctor`."""

from draftgraph.cli.app import app, main

__all__ = ["app", "main"]
