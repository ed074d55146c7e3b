"""Starts the ranks of a model that is split over several processes, and watches them.

`draftgraph.load(..., tensor_parallel=N)` starts N - 1 followers on this machine, each on a GPU of its own where there
are as many; in a script that torchrun starts every rank loads its part itself (`tp_plan="auto"`). Rank 0 and each
follower tell each other every second that they are alive. A rank that ends or falls silent ends the others.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from torch import distributed as dist

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.following import Follower
from draftgraph.engine.ranks import Ranks, current, join
from draftgraph.engine.sharding import group_of
from draftgraph.errors import RankError, UsageError
from draftgraph.notices import notice

BEAT = 1.0  # seconds between two signs of life
SILENCE = 15.0  # seconds without one after which a rank is taken to hang
LATE = 20.0  # seconds that a rank may be behind the others in a pass
GRACE = 4.0  # seconds for this process to notice by itself that others have ended
STARTING = 300.0  # seconds for a follower to import what it needs
MEETING = timedelta(seconds=30)  # for ranks of one machine, all of which have started, to find each other
BEHIND = timedelta(minutes=2)  # for those of a script to do so; then, for one that is behind the others in a load
STOP_SECONDS = 3.0  # for followers to end when rank 0 does
ENDED = 70  # exit status of a rank that could not go on: EX_SOFTWARE of sysexits.h
# Signs of life. Of rank 0 they say what its silence would mean: nothing, that it has ended, or that it is to be ended.
ALIVE, AWAKE, GUARDED = ".", "!", "#"
INTERRUPTED = "the other ranks were ended when a model's load was interrupted: start again with a new process"
HERE = "here"  # a follower can be met; any other line of it is what went wrong
STARTED_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
PARALLEL = ("tp_plan", "tp_size", "distributed_config", "device_mesh")  # arguments of from_pretrained


@dataclass
class Started:
    """A follower, as rank 0 sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    errors: IO[bytes]
    said: str = ""  # other than that it is alive
    silent: float = 0.0  # seconds
    unread: bytes = b""

    def hear(self) -> bool:
        """Takes what it says; False: it has closed its end."""
        try:
            content = self.line.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, self.unread = (self.unread + content).split(b"\n")
        self.silent = 0.0
        for line in lines:
            if (text := line.decode(errors="replace")) != ALIVE:
                self.said = text
        return bool(content)

    @property
    def fate(self) -> str:
        """Why it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        status = self.process.returncode
        if status is None:
            return "does not answer"
        if status < 0:
            return f"was ended by signal {-status}"
        said = self.said if self.said != HERE else ""
        return f"failed: {said or self._last_error or f'it ended with status {status}'}"

    @property
    def _last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass
class Watch:
    """Of rank 0 over its followers, in a thread of its own."""

    ranks: Ranks
    followers: list[Started]
    folder: Path  # where they met
    sign: str = ALIVE
    closing: bool = False
    lost_since: float | None = None
    last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, name="ranks", daemon=True)
        self.thread.start()

    def run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            for one in self.followers:
                waiting.register(one.line, selectors.EVENT_READ, one)
            while not self.closing:
                for key, _ in waiting.select(BEAT):
                    if not key.data.hear() and not self.closing:
                        waiting.unregister(key.fileobj)
                        self.lose(f"rank {key.data.rank} of {self.ranks.size} {key.data.fate}")
                if time.monotonic() - self.last >= BEAT:
                    self.beat()

    def show(self) -> None:
        """The sign to all followers."""
        for one in self.followers:
            with suppress(OSError):
                one.line.send(f"{self.sign} ".encode())

    def beat(self) -> None:
        now = time.monotonic()
        passed, self.last = min(now - self.last, 2 * BEAT), now  # time that this process was stopped does not count
        self.show()
        for one in self.followers:
            one.silent += passed
            if self.sign != ALIVE and one.silent > SILENCE:
                self.lose(f"rank {one.rank} of {self.ranks.size} has been silent for {SILENCE:.0f} seconds")
        if self.ranks.lost is not None and self.lost_since is None:  # what this rank has noticed by itself
            self.lost_since = now
            self.kill()
        since = self.ranks.waits_since
        if since is not None and now - since > LATE:
            self.lose(f"a pass of {self.ranks.size} ranks has not ended in {LATE:.0f} seconds")
        if self.lost_since is not None and now - self.lost_since > GRACE and self.stuck:
            notice(str(self.ranks.lost))
            os._exit(ENDED)

    @property
    def stuck(self) -> bool:
        """Whether this process waits for others who are gone."""
        return self.ranks.computes is not None or self.ranks.waits_since is not None

    def lose(self, why: str) -> None:
        if self.ranks.lost is None:
            self.ranks.lost, self.lost_since = f"{why}, and the model with it", time.monotonic()
        self.kill()

    def kill(self) -> None:
        for one in self.followers:
            if one.process.poll() is None:
                one.process.kill()  # also one that was stopped
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """At the end of this process. Followers end when their line does, wherever they stand."""
        self.closing = True
        for one in self.followers:
            with suppress(OSError):
                one.line.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + STOP_SECONDS
        for one in self.followers:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        self.thread.join(2 * BEAT)
        for one in self.followers:
            one.line.close()
            one.errors.close()
        leave_group()


_watch: Watch | None = None


def ranks_asked(size: int | None, given: dict[str, Any]) -> int:
    """How many ranks a model is to be split over. `given`: arguments of `from_pretrained`, some of which ask for it."""
    if size is not None and size < 1:
        raise UsageError(f"tensor_parallel must be at least 1, not {size}")
    if size is None and not any(given.get(name) is not None for name in PARALLEL):
        return 1
    if by_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if size not in (None, world):
            raise UsageError(f"tensor_parallel={size} in a script of {world} processes: give it to torchrun alone")
        return world
    if size is None:
        raise UsageError("tp_plan needs several processes: start the script with torchrun, or give tensor_parallel=N")
    return size


def by_torchrun() -> bool:
    return all(name in os.environ for name in STARTED_BY_TORCHRUN)


def ranks_for(size: int, device: torch.device) -> Ranks:
    """The ranks of a script that torchrun has started, or those that this process starts."""
    if not by_torchrun():
        return started(size, device)
    if not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        meet(device, int(os.environ.get("LOCAL_WORLD_SIZE", size)), place_of(local, device), BEHIND)
    return scripted()


def scripted() -> Ranks:
    """All processes of a group that a script has made, or torchrun for it."""
    if (ranks := current()) is None:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), scripted=True)
        ranks.follower = None if ranks.leads else Follower(ranks)
        join(ranks)
    return ranks


def adopt_split(model: torch.nn.Module) -> None:
    """A module that a script has split by itself."""
    if group_of(unwrapped(model)) is not None and not (ranks := scripted()).holds(model):
        ranks.adopt(model)


def started(size: int, device: torch.device) -> Ranks:
    """So many ranks on this machine, of which this process is the first; those that are there already, if any are."""
    global _watch
    if (ranks := current()) is not None:
        if ranks.size != size:
            raise UsageError(f"this process has {ranks.size} ranks: a second model cannot have {size}")
        ranks.refuse_lost()
        return ranks
    if dist.is_initialized():
        raise UsageError("this process is one of a group already: give tp_plan='auto' in place of tensor_parallel")
    folder = Path(tempfile.mkdtemp(prefix="draftgraph-ranks-"))
    followers: list[Started] = []
    try:
        followers += [start(rank, size, device, folder) for rank in range(1, size)]
        for one in followers:
            await_here(one, size)
        meet_here(0, size, device, folder)
        ranks = Ranks(0, size)
    except BaseException as error:
        leave_group()
        private.forget_failed_group()
        reason = reason_of_absence(followers, size)
        for one in followers:
            one.process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        if reason is None or not isinstance(error, Exception):
            raise
        raise RankError(reason) from error
    if device.type == "cpu":  # ranks share its cores
        torch.set_num_threads(threads_of(size))
    join(ranks)
    _watch = Watch(ranks, followers, folder)
    atexit.register(_watch.close)
    return ranks


def start(rank: int, size: int, device: torch.device, folder: Path) -> Started:
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the process has ended
    environment = os.environ | {"LOCAL_RANK": str(place_of(rank, device))}
    if device.type == "cpu":
        environment["OMP_NUM_THREADS"] = str(threads_of(size))
    told = {"rank": rank, "size": size, "device": device.type, "folder": str(folder)}
    with theirs:
        command = [sys.executable, "-m", "draftgraph.models.follower", json.dumps(told), str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[theirs.fileno()],
        )
    return Started(rank, process, ours, errors)


def threads_of(size: int) -> int:
    return max(1, torch.get_num_threads() // size)


def await_here(one: Started, size: int) -> None:
    one.line.settimeout(STARTING)
    while one.said != HERE:
        if not one.hear():
            raise RankError(f"rank {one.rank} of {size} {one.fate}")
    one.line.setblocking(False)


def reason_of_absence(followers: list[Started], size: int) -> str | None:
    """Why a follower could not be met, if one has ended."""
    for one in followers:
        if one.process.poll() is not None:
            one.hear()  # its last words
            return f"rank {one.rank} of {size} {one.fate}"
    return None


def place_of(rank: int, device: torch.device) -> int:
    """The number of a rank's GPU; several ranks share one where there are too few."""
    return rank % torch.cuda.device_count() if device.type == "cuda" else rank


def meet_here(rank: int, size: int, device: torch.device, folder: Path) -> None:
    """Makes this process one of a group of this machine, which meets in a folder."""
    if sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # nobody else is to connect
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    meet(device, size, place_of(rank, device), MEETING, store=store, rank=rank, world_size=size)
    store.set_timeout(BEHIND)
    private.set_group_timeout(dist.group.WORLD, BEHIND.total_seconds())


def leave_group() -> None:
    """NCCL's may wait for others who are gone: it is left as it is."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def meet(device: torch.device, size_here: int, place: int, within: timedelta, **told: Any) -> None:
    """On GPUs with NCCL, which does not take two ranks on one: those meet by way of the host."""
    if device.type != "cuda" and torch.cuda.is_available():
        raise UsageError("ranks take the GPUs of a machine: hide them (CUDA_VISIBLE_DEVICES=) to compute on its CPU")
    if device.type != "cuda":
        dist.init_process_group("gloo", timeout=within, **told)
        return
    own = torch.device("cuda", place)
    torch.cuda.set_device(own)
    os.environ.setdefault("LOCAL_RANK", str(place))  # where transformers looks for it
    if torch.cuda.device_count() >= size_here:
        dist.init_process_group("nccl", timeout=within, device_id=own, **told)
    else:
        private.gather_on_host()
        dist.init_process_group("gloo", timeout=within, **told)


@contextmanager
def loading(ranks: Ranks) -> Iterator[None]:
    """Large files are read inside, in which a rank may seem to be silent. A rank 0 that is interrupted there does not
    wait for the others: they are ended."""
    before = ALIVE if _watch is None else _watch.sign
    if _watch is not None:
        _watch.sign = ALIVE
    try:
        yield
    except Exception:
        raise
    except BaseException:
        ranks.lost = ranks.lost or INTERRUPTED
        raise
    finally:
        if _watch is not None:
            _watch.sign = AWAKE if before == ALIVE else before


def guard() -> Callable[[], None]:
    """For a process that is worth nothing without its followers: from now on they end it if it hangs. What is returned
    raises if one of them has ended."""
    ranks = current()
    if ranks is None or _watch is None:
        return lambda: None
    _watch.sign = GUARDED
    _watch.show()
    return ranks.refuse_lost
