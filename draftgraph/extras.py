"""Optional packages, and how to add them to this installation."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from draftgraph.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[1]


def needed(module: str, words: str, extra: str, name: str | None = None) -> Any:
    """An optional package, or what it has of this name; else one line says who needs it and how to get it."""
    try:
        found = import_module(module)
        return found if name is None else getattr(found, name)
    except (ImportError, AttributeError) as error:  # a folder of that name imports too, as an empty package
        raise UsageError(f"{words}: {install_command(extra)}") from error


def install_command(extra: str) -> str:
    """What adds the packages of an extra: from where this package came, which need not be an index."""
    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{CHECKOUT}[{extra}]')}"
    origin = origin_of_installation()
    url, repository = str(origin.get("url", "")), origin.get("vcs_info")
    if repository is not None:
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    elif "dir_info" in origin:
        folder = Path(url2pathname(urlsplit(url).path))
        if not folder.is_dir():
            return f"pip install '.[{extra}]' in a checkout of draftgraph"
        return f"pip install {shlex.quote(f'{folder}[{extra}]')}"
    wanted = f"draftgraph[{extra}]"
    return f"pip install {shlex.quote(f'{wanted} @ {url}' if url else wanted)}"


def origin_of_installation() -> dict[str, Any]:
    """As PEP 610 records it; empty where the package came from an index, or is not installed."""
    try:
        told = json.loads(distribution("draftgraph").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
