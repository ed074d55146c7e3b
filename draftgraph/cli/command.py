"""Registers a command: the common options beside its own, each also in the environment, errors in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from draftgraph.cli.errors import one_line_errors
from draftgraph.cli.options import FIELDS, Settings


def register(app: typer.Typer, function: Callable[..., None], only: tuple[str, ...] = FIELDS, **defaults: Any) -> None:
    """The parameter `settings` of the function stands for the common options, all or `only` some of them."""

    @wraps(function)
    def run(**values: Any) -> None:
        settings = Settings(**{name: values.pop(name) for name in only})
        with one_line_errors(settings.debug):
            function(settings=settings, **values)

    own = [
        value for value in inspect.signature(function, eval_str=True).parameters.values() if value.name != "settings"
    ]
    hints, start = get_type_hints(Settings, include_extras=True), Settings(**defaults)
    kind = inspect.Parameter.KEYWORD_ONLY
    common = [inspect.Parameter(name, kind, default=getattr(start, name), annotation=hints[name]) for name in only]
    parameters = [from_environment(parameter.replace(kind=kind)) for parameter in own + common]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(function.__name__)(run)


def from_environment(parameter: inspect.Parameter) -> inspect.Parameter:
    """An option that is also read from DRAFTGRAPH_<NAME>."""
    kind, info = get_args(parameter.annotation)
    if isinstance(info, OptionInfo):
        info = copy(info)
        info.envvar = f"DRAFTGRAPH_{parameter.name.upper()}"
    return parameter.replace(annotation=Annotated[kind, info])
