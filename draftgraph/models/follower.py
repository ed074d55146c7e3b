"""A follower: a process with one part of a model, which computes what rank 0 tells it.

Started by `draftgraph.models.ranks` as `python -m draftgraph.models.follower FACTS SOCKET`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from draftgraph.engine.following import Follower
from draftgraph.engine.ranks import Ranks, join
from draftgraph.errors import DraftGraphError, one_line
from draftgraph.models.load import load_part
from draftgraph.models.ranks import ALIVE, BEAT, ENDED, GUARDED, HERE, SILENCE, meet_here


class Lifeline:
    """The socket to rank 0: both ends say every second that they are there."""

    def __init__(self, line: socket.socket, folder: Path) -> None:
        self._line, self._folder = line, folder
        self._leader = os.getppid()
        self._sign = ALIVE

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(f"{text}\n".encode())

    def _heard(self) -> str:
        """Nothing when rank 0 has ended."""
        try:
            return self._line.recv(1 << 16).decode()
        except OSError:
            return ""

    def run(self) -> None:
        """In a thread: ends this process when rank 0 has ended or is silent."""
        silent, last = 0.0, time.monotonic()
        while True:
            if select.select([self._line], [], [], BEAT)[0]:
                content = self._heard()
                if not content:
                    self.end(0)
                self._sign, silent = content.split()[-1], 0.0
            now = time.monotonic()
            if now - last >= BEAT:
                silent, last = silent + min(now - last, 2 * BEAT), now  # time that this one was stopped does not count
                self.say(ALIVE)
            if self._sign != ALIVE and silent > SILENCE:
                if self._sign == GUARDED and os.getppid() == self._leader:
                    os.kill(self._leader, signal.SIGKILL)
                self.end(ENDED)

    def end(self, status: int) -> NoReturn:
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(status)  # threads of libraries may hold the interpreter back


def follow(told: dict[str, Any]) -> NoReturn:
    device = torch.device(told["device"])
    meet_here(told["rank"], told["size"], device, Path(told["folder"]))
    ranks = Ranks(told["rank"], told["size"])
    join(ranks)
    Follower(ranks, lambda options: load_part(ranks=ranks, **options)).follow()


def main() -> None:
    facts, descriptor = sys.argv[1:]
    told = json.loads(facts)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    logging.disable(logging.WARNING)
    lifeline = Lifeline(socket.socket(fileno=int(descriptor)), Path(told["folder"]))
    lifeline.say(HERE)
    threading.Thread(target=lifeline.run, name="lifeline", daemon=True).start()
    try:
        follow(told)
    except BaseException as error:
        said = str(error) if isinstance(error, DraftGraphError) else f"{type(error).__name__}: {one_line(error)}"
        lifeline.say(" ".join(said.split()))
        lifeline.end(ENDED)


if __name__ == "__main__":
    main()
