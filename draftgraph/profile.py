"""A setting that `draftgraph tune --search` found, in a TOML file beside the machine and the pair it was found for."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgraph.config import CHOICES, RANGES, GraphConfig
from draftgraph.errors import UsageError

FORMAT = 1
FIELDS = ("mode", "growth", *RANGES)  # of GraphConfig
SURROUNDINGS = ("device", "threads", "dtype")
HEADER = "# A setting that draftgraph tune --search found: use it with --profile.\n"


@dataclass(frozen=True)
class Profile:
    """How to draft; it changes speed, and never a token.

    Attributes:
        setting: Fields of `GraphConfig`.
        found_for: Device, threads, dtype, models by name and by their weights.
        measured: There: times as fast as plain decoding, tokens per pass.
    """

    setting: dict[str, Any]
    found_for: dict[str, Any]
    measured: dict[str, float]

    @property
    def config(self) -> GraphConfig:
        """For `pair.generate(prompt, config=...)`."""
        return GraphConfig(**self.setting)

    def differences(self, here: Mapping[str, Any]) -> list[str]:
        """What is not as it was. Weights are compared where they have the same number format, else names are."""
        same_format = here["dtype"] == self.found_for.get("dtype")
        told_by = {name: name for name in SURROUNDINGS}
        told_by |= {model: f"{model}_weights" if same_format else model for model in ("target", "draft")}
        others = [name for name, key in told_by.items() if self.found_for.get(key) != here[key]]
        return [f"{name} ({different(self.found_for.get(name), here[name])})" for name in others]

    def save(self, file: Path) -> None:
        from draftgraph.files import replacing

        tables = {"setting": self.setting, "found_for": self.found_for, "measured": self.measured}
        parts = [f"{HEADER}format = {FORMAT}\n", *(toml_table(name, values) for name, values in tables.items())]
        with replacing(file) as partial:
            partial.write_text("\n".join(parts), encoding="utf-8")


def different(there: Any, here: Any) -> str:
    """Models of one name may have other weights."""
    return f"{there}, other weights" if there == here else f"{there}, here {here}"


def toml_table(name: str, values: Mapping[str, Any]) -> str:
    """Strings and numbers are written as in JSON; TOML has no word for None."""
    given = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items() if value is not None}
    return "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in given.items()), ""])


def read_profile(path: str | Path) -> Profile:
    """Reads what `draftgraph tune --search` wrote; refuses a file that is no profile.

    Examples:
        >>> config = read_profile("search/profile.toml").config  # doctest: +SKIP
        >>> pair.generate("Why is the sky blue?", config=config)  # doctest: +SKIP
    """
    file = Path(path).expanduser()
    try:
        content = tomllib.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the profile {path} is not TOML: {error}") from error
    tables = [content.get(name) for name in ("setting", "found_for", "measured")]
    if not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path} is no profile: name the profile.toml that draftgraph tune --search wrote")
    if content.get("format") != FORMAT:
        raise UsageError(f"the profile {path} has format {content.get('format')}, not {FORMAT}: make it again")
    profile = Profile(*tables)  # type: ignore[arg-type]
    refuse_wrong_setting(path, profile.setting)
    return profile


def refuse_wrong_setting(path: str | Path, setting: Mapping[str, Any]) -> None:
    if unknown := [name for name in setting if name not in FIELDS]:
        raise UsageError(f"the profile {path} sets {unknown[0]}, which is no setting: {', '.join(FIELDS)} are")
    if setting.get("mode") not in CHOICES["mode"]:
        raise UsageError(f"the profile {path} names no mode: set it to one of {', '.join(CHOICES['mode'])}")
    try:
        GraphConfig(**setting)
    except UsageError as error:
        raise UsageError(f"the profile {path} is wrong: {error}") from error
