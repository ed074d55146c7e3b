"""What the server writes to stderr: one line for each event, as text or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import BinaryIO

from draftgraph.serve.settings import ServerSettings

LONGEST_LINE = 1 << 16  # bytes
output = logging.getLogger("draftgraph.engine")  # what its process writes, whatever level is asked for
output.setLevel(logging.INFO)


@contextlib.contextmanager
def logging_to_stderr(settings: ServerSettings) -> Iterator[None]:
    """Requests and failures of the engine; of libraries, warnings only."""
    root, level = logging.root, logging.getLevelNamesMapping()[settings.log_level.upper()]
    before = root.manager.disable, root.level, logging.getLogger("draftgraph.serve").level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if settings.log_format == "json" else logging.Formatter("%(asctime)s %(message)s"))
    handler.addFilter(RepeatLimit())
    root.addHandler(handler)
    set_levels(logging.NOTSET, max(logging.WARNING, level), level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        set_levels(*before)


def set_levels(disabled: int, libraries: int, own: int) -> None:
    logging.disable(disabled)
    logging.root.setLevel(libraries)
    logging.getLogger("draftgraph.serve").setLevel(own)


def logged_pipe() -> tuple[asyncio.Task[None], BinaryIO]:
    """A pipe whose lines are logged: the task that does so, and the end for a process. For asyncio, a process with a
    pipe of asyncio's own has not ended while another that it has started holds that pipe."""
    ours, theirs = os.pipe()
    return asyncio.create_task(log_lines(os.fdopen(ours, "rb"))), os.fdopen(theirs, "wb")


async def log_lines(pipe: BinaryIO) -> None:
    """Until it ends; libraries write there in their own ways."""
    stream, rest = asyncio.StreamReader(), b""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    with contextlib.closing(transport):
        while chunk := await stream.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                log_line(line)
        log_line(rest)


def log_line(line: bytes) -> None:
    if text := line.decode("utf-8", "replace").strip():
        output.info("%s", text)


class JSONLines(logging.Formatter):
    """An object a line; what is known of a request has names of its own."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found | getattr(record, "fields", {}))


class RepeatLimit(logging.Filter):
    """Lets few warnings of one line of code pass in a while: clients can cause some of them as often as they like."""

    def __init__(self, most: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.pathname, record.lineno), time.monotonic()
        started, count = self._counts.get(place, (now, 0))
        if now - started > self._seconds:
            if count > self._most:
                record.msg, record.args = f"{record.getMessage()} ({count - self._most} more were not logged)", ()
            started, count = now, 0
        self._counts[place] = started, count + 1
        return count < self._most
