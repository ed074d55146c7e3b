"""The options that commands share, defined once, and what they mean to the library."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from draftgraph.cli.configfile import read_config_file
from draftgraph.cli.errors import complain
from draftgraph.config import CHOICES, PRICES, RANGES, GraphConfig
from draftgraph.errors import UsageError
from draftgraph.profile import read_profile

SAMPLING: dict[str, tuple[float, float | None]] = {
    "max_new_tokens": (1, None),
    "temperature": (0, None),
    "top_k": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, None),
    "seed": (0, None),
}
DTYPES = ["float32", "bfloat16", "float16", "float64", "auto"]


def option(panel: str, help: str, metavar: str | None = None, choices: list[str] | None = None, **more: Any) -> Any:
    if choices:
        more |= {"autocompletion": lambda: choices}
    return typer.Option(help=help, rich_help_panel=panel, metavar=metavar, show_envvar=False, **more)


def model(help: str, metavar: str, choices: list[str] | None = None) -> Any:
    return option("Model", help, metavar, choices)


def graph(name: str, help: str) -> Any:
    if name in CHOICES:
        return option("Graph", help, "|".join(CHOICES[name]), list(CHOICES[name]))
    return option("Graph", help, shown_range(*RANGES[name]))


def sampling(name: str, help: str) -> Any:
    return option("Sampling", help, shown_range(*SAMPLING[name]))


def output(help: str, **more: Any) -> Any:
    return option("Input and output", help, **more)


def shown_range(low: float, high: float | None = None) -> str:
    return f"N>={low:g}" if high is None else f"{low:g}..{high:g}"


@dataclass(frozen=True)
class Settings:
    """Every common option; what is left out takes the mode's, the model's or the loader's own default."""

    target: Annotated[str | None, model("Hub name, folder or GGUF file; left out: the default model", "MODEL")] = None
    draft: Annotated[
        str | None,
        model("Draft model; self: the target, none: no draft; left out: the default's", "MODEL", ["self", "none"]),
    ] = None
    device: Annotated[str | None, model("Where to compute", "cpu|cuda|cuda:N", ["cpu", "cuda"])] = None
    dtype: Annotated[str | None, model("Number format of weights", "|".join(DTYPES), DTYPES)] = None

    mode: Annotated[str | None, graph("mode", "How to draft, auto if left out; off: decode plainly")] = None
    k: Annotated[int | None, graph("k", "Children per node")] = None
    tau: Annotated[int | None, graph("tau", "Tokens of a repeated n-gram that make a merge")] = None
    theta_prob: Annotated[float | None, graph("theta_prob", "Under it a node stays a leaf")] = None
    theta_sib: Annotated[float | None, graph("theta_sib", "Children under this share of the best are dropped")] = None
    max_nodes: Annotated[int | None, graph("max_nodes", "Nodes checked in one pass, the root counted")] = None
    max_depth: Annotated[int | None, graph("max_depth", "Levels of a graph")] = None
    chain_length: Annotated[int | None, graph("chain_length", "Drafted tokens in mode chain")] = None
    growth: Annotated[str | None, graph("growth", "Order in which a graph grows")] = None
    cost: Annotated[
        str | None, option("Graph", "What mode auto takes passes to cost", "|".join(PRICES), list(PRICES))
    ] = None
    profile: Annotated[
        str | None, option("Graph", "A setting that tune --search found; other options win over it", "FILE")
    ] = None

    max_new_tokens: Annotated[int | None, sampling("max_new_tokens", "Tokens to generate at most, 256")] = None
    temperature: Annotated[float | None, sampling("temperature", "Sample; left out or 0: greedy")] = None
    top_k: Annotated[int | None, sampling("top_k", "Sample from the best tokens, this many; 0: from all")] = None
    top_p: Annotated[float | None, sampling("top_p", "Sample from the best tokens with this mass")] = None
    min_p: Annotated[float | None, sampling("min_p", "Drop tokens under this share of the best")] = None
    repetition_penalty: Annotated[float | None, sampling("repetition_penalty", "Over 1: repeat less")] = None
    stop: Annotated[list[str] | None, option("Sampling", "Stop after this text; may be given again", "TEXT")] = None
    seed: Annotated[int | None, sampling("seed", "The same seed gives the same sampled text")] = None

    raw: Annotated[bool, output("Take the prompt as it is, without the chat template")] = False
    stats: Annotated[bool, output("Show where tokens and time came from")] = False
    json: Annotated[bool, output("Print one JSON object")] = False
    config: Annotated[
        str | None, output("TOML file of options", metavar="FILE", is_eager=True, callback=read_config_file)
    ] = None
    debug: Annotated[bool, output("Show tracebacks and the warnings of libraries")] = False

    def given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of `draftgraph.load`."""
        return self.given("target", "draft", "device", "dtype")

    def graph_config(self, **changes: Any) -> GraphConfig:
        return GraphConfig(**self.profile_setting() | self.given("mode", "growth", "cost", *RANGES) | changes)

    def profile_setting(self) -> dict[str, Any]:
        """Nothing where a mode was asked for that the profile is not for."""
        setting = {} if self.profile is None else read_profile(self.profile).setting
        return setting if self.mode in (None, setting.get("mode")) else {}

    def sampling_arguments(self) -> dict[str, Any]:
        """Arguments of `Pair.start` and `Pair.generate`, the graph's configuration apart."""
        given = self.given(*SAMPLING)
        for name, value in given.items():
            refuse_outside(name, value, *SAMPLING[name])
        if self.stop and not all(self.stop):
            raise UsageError("--stop must be some text, not ''")
        if (unused := self.given("top_k", "top_p", "min_p")) and not self.temperature:
            complain(f"{', '.join(unused)} changes nothing without a temperature: decoding is greedy")
        return given | {"raw": self.raw} | ({"stop_strings": self.stop} if self.stop else {})


FIELDS = tuple(field.name for field in fields(Settings))


def refuse_outside(name: str, value: float, low: float, high: float | None = None) -> None:
    if not (low <= value < math.inf and (high is None or value <= high)):
        allowed = f"a number of at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} must be {allowed}, not {value}")
