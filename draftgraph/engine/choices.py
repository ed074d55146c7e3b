"""Which way of computing a product was the quickest, kept between starts: one file per device."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from draftgraph.files import cache_dir, replacing
from draftgraph.hardware import device_name, digest


class Choices:
    """Names by what they were chosen for; read when first asked, written with every new one."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, str]] = {}

    def get(self, device: torch.device, what: str) -> str | None:
        return self._of(device).get(what)

    def put(self, device: torch.device, what: str, name: str) -> None:
        known, file = self._of(device), file_of(device)
        known |= read(file) | known | {what: name}  # what others have chosen in the meantime stays
        with suppress(OSError):  # only time is lost
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(json.dumps(known, indent=1), encoding="utf-8")

    def forget(self, device: torch.device) -> None:
        """So that all are chosen again."""
        self._of(device).clear()
        with suppress(OSError):
            file_of(device).unlink()

    def _of(self, device: torch.device) -> dict[str, str]:
        file = file_of(device)
        if file not in self._known:
            self._known[file] = read(file)
        return self._known[file]


def read(file: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    return {}


def file_of(device: torch.device) -> Path:
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return cache_dir() / "products" / f"{digest([device_name(device), torch.__version__, threads])}.json"
