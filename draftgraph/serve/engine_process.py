"""The engine's side of the wire: reads commands while it computes, and sends the outcome of every step.

Started by `draftgraph.serve.engine` as `python -m draftgraph.serve.engine_process OPTIONS SOCKET`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.batching.job import Job, Kind, Progress
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.serve import wire

if TYPE_CHECKING:
    from draftgraph.batching import Scheduler

FAULT = 70  # EX_SOFTWARE of sysexits.h
Fields = dict[str, Any]  # of a job
FIGURES_SECONDS = 1.0  # between figures, at most


class Loop:
    """Runs a scheduler for the API at the other end of a connection, until that goes away."""

    def __init__(
        self,
        connection: socket.socket,
        scheduler: Scheduler,
        job_of: Callable[[dict[str, Any]], Any],
        refuse_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`refuse_lost` raises if a process that the model needs has ended."""
        self._connection, self._scheduler, self._job_of, self._refuse_lost = connection, scheduler, job_of, refuse_lost
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._stopped = False
        self._figures: dict[str, Any] = {}
        self._figures_sent = 0.0

    def run(self, ready: dict[str, Any]) -> None:
        self.send({"ready": ready})
        threading.Thread(target=self._read_commands, name="commands", daemon=True).start()
        while not self._stopped:
            self._run_commands()
            self._refuse_lost()
            if self._scheduler.busy:
                self._tell(self._scheduler.step())
            self._send_figures()

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(wire.line(message))

    def _read_commands(self) -> None:
        """Runs in its own thread. When the API process is gone the engine ends at once, in the middle of a step."""
        with contextlib.suppress(ConnectionError):
            for line in self._connection.makefile("rb"):
                self._commands.put(wire.message(line))
        os._exit(0)

    def _run_commands(self) -> None:
        """All that have come; waits for one if there is no job."""
        try:
            if not self._scheduler.busy:
                self._run_command(self._commands.get(timeout=FIGURES_SECONDS))
            while True:
                self._run_command(self._commands.get_nowait())
        except queue.Empty:
            return

    def _run_command(self, command: dict[str, Any]) -> None:
        if "submit" in command:
            self._submit(command["submit"])
        elif "cancel" in command:
            if (last := self._scheduler.cancel(command["cancel"])) is not None:
                self._tell([last])
        elif "stop" in command:
            self._stopped = True

    def _submit(self, fields: Fields) -> None:
        try:
            self._scheduler.submit(self._job_of(fields))
        except UsageError as error:
            self._refuse(fields["id"], "usage", str(error))
        except Exception as error:
            self.send({"traceback": traceback.format_exc()})
            self._refuse(fields["id"], "engine", in_one_line(error))

    def _refuse(self, id: str, kind: Kind, why: str) -> None:
        self._tell([Progress.failed(id, kind, why)])

    def _tell(self, progress: list[Progress]) -> None:
        if progress:
            self.send({"progress": [one.to_dict() for one in progress]})

    def _send_figures(self) -> None:
        figures, now = self._scheduler.figures(), time.monotonic()
        idle = not self._scheduler.busy
        if now - self._figures_sent >= FIGURES_SECONDS or (idle and figures != self._figures):
            self._figures, self._figures_sent = figures, now
            self.send({"figures": figures})


def in_one_line(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, DraftGraphError) else f"{type(error).__name__}: {said}"[:500]


def reporting_faults(connection: socket.socket, work: Callable[[], None]) -> int:
    """Does the work and returns the exit status; a fault is sent in one line before the process ends."""
    try:
        work()
    except ConnectionError:
        return 0  # the API went away
    except BaseException as error:
        if not isinstance(error, DraftGraphError):
            connection.sendall(wire.line({"traceback": traceback.format_exc()}))
        connection.sendall(wire.line({"fault": in_one_line(error)}))
        return FAULT
    return 0


def serve_pair(connection: socket.socket, options: dict[str, Any]) -> None:
    """Loads a pair and answers jobs with it."""
    import draftgraph
    from draftgraph.batching import Limits, Scheduler
    from draftgraph.kernels.packed import number_format
    from draftgraph.models.adapter import read_adapter
    from draftgraph.models.ranks import guard

    adapters = {name: read_adapter(name, Path(folder)) for name, folder in options.get("adapters", {}).items()}
    pair = draftgraph.load(**options["load"])
    refuse_lost = guard()
    config = draftgraph.GraphConfig(**options["graph"])
    scheduler = Scheduler(pair, Limits(**options["limits"]), config, adapters)
    scheduler.batch.prepare(config)
    ready = {
        "model": options["name"],
        "context_window": scheduler.window,
        "vocabulary": scheduler.vocabulary,
        "draft": pair.draft is not None,
        "device": str(pair.target.device),
        "dtype": number_format(pair.target),
        "mode": config.mode,
        "exact": scheduler.batch.engines.inexact is None,
    }
    Loop(connection, scheduler, Job.from_dict, refuse_lost).run(ready)


def main() -> None:
    options, descriptor = sys.argv[1:]
    logging.disable(logging.WARNING)  # of libraries; ours come as warnings
    connection = socket.socket(fileno=int(descriptor))
    status = reporting_faults(connection, lambda: serve_pair(connection, json.loads(options)))
    sys.stderr.flush()
    os._exit(status)  # threads of libraries may hold the interpreter back


if __name__ == "__main__":
    main()
