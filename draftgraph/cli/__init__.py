"""The command line: one module for each command or family of commands."""

from draftgraph.cli.app import app, main

__all__ = ["app", "main"]
