"""Measurements on disk, a file each."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from draftgraph.files import cache_dir, replacing
from draftgraph.hardware import digest
from draftgraph.notices import notice
from draftgraph.tuning.latency import Latencies
from draftgraph.tuning.machine import Key


def file_of(key: Key) -> Path:
    return cache_dir() / "costs" / f"{digest(key)}.json"


def read(key: Key) -> Latencies | None:
    """What was measured for this key; a file that is damaged, or not for it, counts for nothing."""
    file = file_of(key)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("it is of another machine or model")
        return Latencies.from_dict(content["latencies"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        notice(f"cannot use {file} ({type(error).__name__}: {error}): passes are measured again")
        return None


def write(key: Key, latencies: Latencies) -> None:
    file = file_of(key)
    with suppress(OSError):  # only time is lost
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps({"key": key, "latencies": latencies.to_dict()}, indent=1), encoding="utf-8")
