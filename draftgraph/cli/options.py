"""The options of commands: those that all share, the file and the environment that give them, and their ranges."""

from __future__ import annotations

import difflib
import inspect
import math
import tomllib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from draftgraph.cli.errors import complain, one_line_errors
from draftgraph.config import CHOICES, PRICES, RANGES, GraphConfig
from draftgraph.errors import UsageError
from draftgraph.profile import read_profile

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
DTYPES = ["float32", "bfloat16", "float16", "float64", "auto"]
OUTPUT = "Input and output"
MODELS = ("target", "draft", "device", "dtype")  # common options that most commands take
REPORTS = ("json", "config", "debug")


def option(
    panel: str,
    help: str,
    metavar: str | None = None,
    choices: list[str] | None = None,
    *,
    least: float | None = None,
    most: float | None = None,
    **more: Any,
) -> Any:
    """An option in a panel of the help; a value outside of its range is refused before the command runs."""
    if choices:
        metavar = metavar or "|".join(choices)
        more |= {"autocompletion": lambda: choices}
    elif least is not None:
        metavar = metavar or shown_range(least, most)
    return typer.Option(
        help=help, rich_help_panel=panel, metavar=metavar, show_envvar=False, min=least, max=most, **more
    )


def graph(name: str, help: str) -> Any:
    if name in CHOICES:
        return option("Graph", help, choices=list(CHOICES[name]))
    return option("Graph", help, shown_range(*RANGES[name]))  # GraphConfig refuses what is outside


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


@dataclass(frozen=True)
class Settings:
    """Every common option; what is left out takes the mode's, the model's or the loader's own default."""

    target: Annotated[
        str | None, option("Model", "Hub name, folder or GGUF file; left out: the default model", "MODEL")
    ] = None
    draft: Annotated[
        str | None,
        option(
            "Model", "Draft model; self: the target, none: no draft; left out: the default's", "MODEL", ["self", "none"]
        ),
    ] = None
    device: Annotated[str | None, option("Model", "Where to compute", "cpu|cuda|cuda:N", ["cpu", "cuda"])] = None
    dtype: Annotated[str | None, option("Model", "Number format of weights", choices=DTYPES)] = None

    mode: Annotated[str | None, graph("mode", "How to draft, auto if left out; off: decode plainly")] = None
    k: Annotated[int | None, graph("k", "Children per node")] = None
    tau: Annotated[int | None, graph("tau", "Tokens of a repeated n-gram that make a merge")] = None
    theta_prob: Annotated[float | None, graph("theta_prob", "Under it a node stays a leaf")] = None
    theta_sib: Annotated[float | None, graph("theta_sib", "Children under this share of the best are dropped")] = None
    max_nodes: Annotated[int | None, graph("max_nodes", "Nodes checked in one pass, the root counted")] = None
    max_depth: Annotated[int | None, graph("max_depth", "Levels of a graph")] = None
    chain_length: Annotated[int | None, graph("chain_length", "Drafted tokens in mode chain")] = None
    growth: Annotated[str | None, graph("growth", "Order in which a graph grows")] = None
    cost: Annotated[str | None, option("Graph", "What mode auto takes passes to cost", choices=list(PRICES))] = None
    profile: Annotated[
        str | None, option("Graph", "A setting that tune --search found; other options win over it", "FILE")
    ] = None

    max_new_tokens: Annotated[int | None, option("Sampling", "Tokens to generate at most, 256", least=1)] = None
    temperature: Annotated[float | None, option("Sampling", "Sample; left out or 0: greedy", least=0)] = None
    top_k: Annotated[int | None, option("Sampling", "Sample from the best tokens, this many; 0: from all", least=0)] = (
        None
    )
    top_p: Annotated[
        float | None, option("Sampling", "Sample from the best tokens with this mass", least=0, most=1)
    ] = None
    min_p: Annotated[float | None, option("Sampling", "Drop tokens under this share of the best", least=0, most=1)] = (
        None
    )
    repetition_penalty: Annotated[float | None, option("Sampling", "Over 1: repeat less", least=0.01)] = None
    stop: Annotated[list[str] | None, option("Sampling", "Stop after this text; may be given again", "TEXT")] = None
    seed: Annotated[int | None, option("Sampling", "The same seed gives the same sampled text", least=0)] = None

    raw: Annotated[bool, option(OUTPUT, "Take the prompt as it is, without the chat template")] = False
    stats: Annotated[bool, option(OUTPUT, "Show where tokens and time came from")] = False
    json: Annotated[bool, option(OUTPUT, "Print one JSON object")] = False
    config: Annotated[
        str | None, option(OUTPUT, "TOML file of options", metavar="FILE", is_eager=True, callback=read_config_file)
    ] = None
    debug: Annotated[bool, option(OUTPUT, "Show tracebacks and the warnings of libraries")] = False

    def given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of `draftgraph.load`."""
        return self.given(*MODELS)

    def graph_config(self, **changes: Any) -> GraphConfig:
        return GraphConfig(**self.profile_setting() | self.given("mode", "growth", "cost", *RANGES) | changes)

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


def register(app: typer.Typer, function: Callable[..., None], only: tuple[str, ...] = FIELDS, **defaults: Any) -> None:
    """Makes a function a command, with errors in one line.

    Its parameter `settings` stands for the common options, all or `only` some of them. Every option is also read from
    the environment, as DRAFTGRAPH_<NAME>.
    """
    hints, start = get_type_hints(Settings, include_extras=True), Settings(**defaults)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [one for one in inspect.signature(function, eval_str=True).parameters.values() if one.name != "settings"]
    common = [inspect.Parameter(name, kind, default=getattr(start, name), annotation=hints[name]) for name in only]
    parameters, ranges = [], {}
    for parameter in own + common:
        type_, info = get_args(parameter.annotation)
        info = copy(info)
        if isinstance(info, OptionInfo):
            info.envvar = f"DRAFTGRAPH_{parameter.name.upper()}"
            if info.min is not None:
                ranges[parameter.name] = (info.min, info.max)
            info.min = info.max = None  # Typer would let inf and nan pass
        parameters.append(parameter.replace(kind=kind, annotation=Annotated[type_, info]))

    @wraps(function)
    def run(**values: Any) -> None:
        with one_line_errors(values["debug"]):
            for name, (low, high) in ranges.items():
                if values[name] is not None:
                    refuse_outside(name, values[name], low, high)
            settings = Settings(**{name: values.pop(name) for name in only})
            function(settings=settings, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(function.__name__)(run)
