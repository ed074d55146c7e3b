"""Options from a TOML file, taken as if they had been typed, but after the command line and the environment."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer


def read_config_file(context: typer.Context, path: str | None) -> str | None:
    """Callback of `--config`: the file's values become the command's defaults."""
    if path is None or context.resilient_parsing:
        return path
    try:
        content = Path(path).expanduser().read_bytes().decode("utf-8")
        values = tomllib.loads(content)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise typer.BadParameter(f"{path} is not UTF-8 text: line {line} has other bytes") from error
    except tomllib.TOMLDecodeError as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from error
    known = option_names(context)
    context.default_map = {
        name: as_typed(path, key, value) for key, value in values.items() if (name := checked(path, key, known))
    }
    return path


def option_names(context: typer.Context) -> set[str]:
    """Options of all commands: one file may serve several."""
    parameters = [parameter for command in commands_of(context.find_root().command) for parameter in command.params]
    named = {parameter.name for parameter in parameters if parameter.param_type_name == "option"}
    return named - {"config", "help"}


def commands_of(group: Any) -> Iterator[Any]:
    for command in getattr(group, "commands", {}).values():
        yield command
        yield from commands_of(command)


def checked(path: str, key: str, known: set[str]) -> str:
    name = key.replace("-", "_")
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
    raise typer.BadParameter(f"{path} sets {key!r}, which is no option{hint}")


def as_typed(path: str, key: str, value: Any) -> str | list[str]:
    if isinstance(value, dict):
        raise typer.BadParameter(f"{path} has a table [{key}]: give a single value")
    if isinstance(value, list):
        return [str(item) for item in value]
    return str(value)
