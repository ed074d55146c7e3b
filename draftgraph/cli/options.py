"""The options of commands: those that all share, the file and the environment that give them, and their ranges.

Their texts stand in options.toml.
"""

from __future__ import annotations

import difflib
import inspect
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from draftgraph.cli.terminal import complain, one_line_errors
from draftgraph.config import CHOICES, PRICES, RANGES, GraphConfig
from draftgraph.errors import UsageError
from draftgraph.profile import read_profile

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
ALLOWED: dict[str, Iterable[str]] = {**CHOICES, "cost": PRICES}
MODELS = ("target", "draft", "device", "dtype", "quantize")  # common options that most commands take
SPLIT = "tensor_parallel"  # of commands whose target is only asked through an engine
REPORTS = ("json", "config", "debug")
TEXTS: dict[str, dict[str, Any]] = {  # of options, by command
    command: {name: text | {"rich_help_panel": panel} for panel in panels for name, text in panels[panel].items()}
    for command, panels in tomllib.loads(files(__package__).joinpath("options.toml").read_text("utf-8")).items()
}
KNOWN = {name for texts in TEXTS.values() for name in texts if texts[name]["rich_help_panel"] != "Arguments"}


def shown_range(low: float, high: float | None = None) -> str:
    return f"N>={low:g}" if high is None else f"{low:g}..{high:g}"


def refuse_outside(name: str, value: float, low: float, high: float | None = None) -> None:
    if not (low <= value < math.inf and (high is None or value <= high)):
        allowed = f"a number of at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} must be {allowed}, not {value}")


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
    context.default_map = {
        name: as_typed(path, key, value) for key, value in values.items() if (name := checked(path, key))
    }
    return path


def checked(path: str, key: str) -> str:
    """The name of an option, of any command: one file may serve several."""
    name = key.replace("-", "_")
    if name in KNOWN and name != "config":
        return name
    near = difflib.get_close_matches(name, KNOWN - {"config"}, n=1, cutoff=0.5)
    hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
    raise typer.BadParameter(f"{path} sets {key!r}, which is no option{hint}")


def as_typed(path: str, key: str, value: Any) -> str | list[str]:
    if isinstance(value, dict):
        raise typer.BadParameter(f"{path} has a table [{key}]: give a single value")
    if isinstance(value, list):
        return [str(item) for item in value]
    return str(value)


@dataclass(frozen=True)
class Settings:
    """Every common option, as options.toml describes it; what is left out takes the mode's or the model's default."""

    target: str | None = None
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    tensor_parallel: int | None = None

    mode: str | None = None
    k: int | None = None
    tau: int | None = None
    theta_prob: float | None = None
    theta_sib: float | None = None
    max_nodes: int | None = None
    max_depth: int | None = None
    chain_length: int | None = None
    growth: str | None = None
    cost: str | None = None
    exact: bool = False
    profile: str | None = None

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | None = None
    seed: int | None = None

    raw: bool = False
    stats: bool = False
    json: bool = False
    config: str | None = None
    debug: bool = False

    def given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of `draftgraph.load`."""
        return self.given(*MODELS, SPLIT)

    def graph_config(self, **changes: Any) -> GraphConfig:
        given = self.given("mode", "growth", "cost", *RANGES) | ({"exact": True} if self.exact else {})
        return GraphConfig(**self.profile_setting() | given | changes)

    def profile_setting(self) -> dict[str, Any]:
        """Nothing where a mode was asked for that the profile is not for."""
        setting = {} if self.profile is None else read_profile(self.profile).setting
        return setting if self.mode in (None, setting.get("mode")) else {}

    def sampling_arguments(self) -> dict[str, Any]:
        """Arguments of `Pair.start` and `Pair.generate`, the graph's configuration apart."""
        if self.stop and not all(self.stop):
            raise UsageError("--stop must be some text, not ''")
        if (unused := self.given("top_k", "top_p", "min_p")) and not self.temperature:
            complain(f"{', '.join(unused)} changes nothing without a temperature: decoding is greedy")
        return self.given(*SAMPLING) | {"raw": self.raw} | ({"stop_strings": self.stop} if self.stop else {})


FIELDS = tuple(field.name for field in fields(Settings))


def register(
    app: typer.Typer,
    function: Callable[..., None],
    only: tuple[str, ...] = FIELDS,
    defaults: Settings | None = None,
    also: type | None = None,
    choices: dict[str, Iterable[str]] | None = None,
    **shown: Any,
) -> None:
    """Makes a function a command, with errors in one line.

    Its parameter `settings` stands for the common options, all or `only` some of them. Every option is also read from
    the environment, as DRAFTGRAPH_<NAME>. Fields of the dataclass `also` that options.toml describes for this command
    become options as well. `shown` are the values that its texts name in braces.
    """
    texts, kind = TEXTS.get(function.__name__, {}), inspect.Parameter.KEYWORD_ONLY
    own = {one.name: one for one in inspect.signature(function, eval_str=True).parameters.values()}
    del own["settings"]
    if also is not None:
        del own["more"]
        own = parameters_of(also(), [name for name in texts if hasattr(also, name)]) | own
        own = {name: own[name] for name in [*(own.keys() - texts.keys()), *texts]}
    parameters, ranges = [], {}
    for parameter in (own | parameters_of(defaults or Settings(), only)).values():
        text = texts.get(parameter.name) or TEXTS["common"][parameter.name]
        info, ranges[parameter.name] = declared(parameter.name, text, ALLOWED | (choices or {}), shown)
        parameters.append(parameter.replace(kind=kind, annotation=Annotated[parameter.annotation, info]))

    @wraps(function)
    def run(**values: Any) -> None:
        with one_line_errors(values["debug"]):
            for name, bounds in ranges.items():
                if bounds and values[name] is not None:
                    refuse_outside(name, values[name], *bounds)
            settings = Settings(**{name: values.pop(name) for name in only})
            function(settings=settings, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(function.__name__)(run)


def parameters_of(instance: Any, names: Iterable[str]) -> dict[str, inspect.Parameter]:
    """Fields of a dataclass as parameters of a function."""
    hints, kind = get_type_hints(type(instance)), inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=getattr(instance, name), annotation=hints[name]) for name in names
    }


def declared(name: str, text: Mapping[str, Any], choices: Mapping[str, Iterable[str]], shown: Any) -> tuple[Any, Any]:
    """A parameter as Typer declares it, and its range: Typer would let inf and nan pass."""
    given: dict[str, Any] = {key: one.format_map(shown) if isinstance(one, str) else one for key, one in text.items()}
    if given["rich_help_panel"] == "Arguments":
        return typer.Argument(**given), None
    values: dict[str, Any] = {"envvar": f"DRAFTGRAPH_{name.upper()}", "show_envvar": False}
    bounds = (given.pop("least"), given.pop("most", None)) if "least" in given else None
    if allowed := list(given.pop("choices", choices.get(name, ()))):
        values |= {"metavar": "|".join(allowed), "autocompletion": lambda: allowed}
    elif limits := bounds or RANGES.get(name):  # what is outside of the latter GraphConfig refuses
        values["metavar"] = shown_range(*limits)
    if name == "config":
        values["callback"] = read_config_file
    flags = given.pop("flag", "").split()
    return typer.Option(*flags, **values | given), bounds
