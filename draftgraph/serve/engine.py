"""The API's side of the wire: keeps an engine process running and hands its messages to the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from draftgraph.batching.job import Job, Kind, Progress
from draftgraph.serve import wire
from draftgraph.serve.errors import failure
from draftgraph.serve.logs import logged_pipe
from draftgraph.serve.quota import Quota
from draftgraph.serve.settings import ServerSettings
from draftgraph.serve.wire import Ready

logger = logging.getLogger("draftgraph.serve")
MOST_UNREAD = 1 << 20  # of one request that its client has not read, see `Progress.size`: about 10 MB
MOST_TOKENS = 1 << 22  # that one request sends, once for each answer: to write them takes a third of a second
SLACK = 5.0  # seconds past its deadline, or its end, after which a job is given up without a message of the engine
EXIT_SECONDS = 5.0  # for an engine to end after a stop message
LAST_WORDS = 0.5  # seconds for what it has written on stderr when it ended
SOUND_SECONDS = 60.0  # an engine that ran this long is started again without waiting longer than the first time


class Submission:
    """Jobs of one request: an iterator over their progress until all have ended. Closing it cancels the rest."""

    def __init__(self, tenant: str, ids: Iterable[str], cancel: Callable[[str], None]) -> None:
        self.tenant, self._open, self._cancel = tenant, set(ids), cancel
        self._queue: asyncio.Queue[Progress] = asyncio.Queue()
        self._unread = 0

    def put(self, progress: Progress) -> None:
        if self._unread and self._unread + progress.size > MOST_UNREAD:
            progress = self._give_up(progress.id)
        self._unread += progress.size
        self._queue.put_nowait(progress)

    def _give_up(self, id: str) -> Progress:
        """The client does not read its stream: what it has not read is dropped, and nothing more is computed."""
        for one in self._open:
            self._cancel(one)
        while not self._queue.empty():
            self._queue.get_nowait()
        self._unread = 0
        return Progress.failed(id, "usage", "the stream was given up: it was not read as fast as it came")

    async def __aiter__(self) -> AsyncIterator[Progress]:
        while self._open:
            progress = await self._queue.get()
            self._unread -= progress.size
            if progress.id in self._open:
                if progress.finish_reason is not None:
                    self._open.discard(progress.id)
                yield progress

    def close(self) -> None:
        for id in self._open:
            self._cancel(id)


class Engine:
    """An engine process, started again whenever it dies. Lives in one event loop."""

    def __init__(self, command: Sequence[str], settings: ServerSettings) -> None:
        self.ready: Ready | None = None
        self.figures: dict[str, Any] = {}
        self.closing = False
        self.failed_to_start: str | None = None  # it never came up: starting it again would not help
        self.on_failed_start: Callable[[], None] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_finished: Callable[[Progress], None] = lambda progress: None  # once for each job that it ended
        self.process_id: int | None = None
        self._command, self._settings = list(command), settings
        self.places = Quota("answers", settings.max_texts + settings.max_waiting, settings.max_per_key)
        self._submissions: dict[str, Submission] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._was_ready = False
        self._last_message = 0.0  # when the last message of the engine came

    async def start(self) -> None:
        self._watch = asyncio.create_task(self._keep_running(), name="engine")

    async def stop(self) -> None:
        """Ends the process, and whatever still waits with an error."""
        self.fail_all("stopping", "the server is stopping")
        self.closing = True
        if self._watch is not None:
            self._send({"stop": True})
            done, _ = await asyncio.wait({self._watch}, timeout=EXIT_SECONDS)
            if not done:
                self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def drain(self, seconds: float) -> None:
        """No new jobs; those under way have some time left."""
        self.closing = True
        asyncio.get_running_loop().call_later(seconds, self.fail_all, "stopping", "the server is stopping")

    @property
    def under_way(self) -> int:
        return len(self._submissions)

    @property
    def is_silent(self) -> bool:
        """Whether its loop stands still, or a pass takes very long: requests may wait, but more should go elsewhere."""
        return time.monotonic() - self._last_message > self._settings.heartbeat

    def require_ready(self) -> Ready:
        """The facts of a model that can answer."""
        if self.closing:
            raise failure("stopping", "the server is stopping")
        if self.ready is None or self._writer is None:
            raise failure("engine", "the model is not ready: try again later")
        return self.ready

    def submit(self, jobs: Sequence[Job]) -> Submission:
        """For a request that holds places for its answers: from now on each job has one, until it is done."""
        self.require_ready()
        if (tokens := sum(job.token_count for job in jobs)) > MOST_TOKENS:
            raise failure("usage", f"this sends {tokens} tokens, once for each answer: {MOST_TOKENS} are the most")
        submission = Submission(jobs[0].tenant, [job.id for job in jobs], self.cancel)
        self.places.add(submission.tenant, len(jobs))
        for job in jobs:
            self._submissions[job.id] = submission
            if job.deadline is not None:
                self._give_up_after(job.deadline + SLACK, job.id)
            self._send({"submit": job.to_dict()})
        return submission

    def end(self, id: str) -> None:
        """Its answer is complete: only its figures are waited for, and not for long."""
        self._send({"cancel": id})
        self._give_up_after(SLACK, id)

    def cancel(self, id: str) -> None:
        """Nobody waits for it any more."""
        if self._forget(id) is not None:
            self._send({"cancel": id})

    def fail_all(self, kind: Kind, message: str) -> None:
        if self._submissions:
            logger.warning("%d answers end with an error: %s", len(self._submissions), message)
        for id in list(self._submissions):
            self._send({"cancel": id})
            self._deliver(Progress.failed(id, kind, message))

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            fault = await self._run_once()
            self.ready = self._writer = self.process_id = None
            self.figures = {}
            self.fail_all("engine", f"the engine failed ({fault}): try again later")
            if self.closing:
                return
            logger.error("the engine failed: %s", fault)
            self.on_failure()
            if not self._was_ready:
                self.failed_to_start = fault
                self.on_failed_start()
                return
            failures = 1 if time.monotonic() - started > SOUND_SECONDS else failures + 1
            await asyncio.sleep(self._wait_after(failures))

    def _wait_after(self, failures: int) -> float:
        return min(self._settings.restart_wait * 2.0 ** min(failures - 1, 30), self._settings.restart_wait_most)

    async def _run_once(self) -> str:
        """Starts a process and reads its messages until it ends; returns why it ended, in one line."""
        ours, theirs = socket.socketpair()
        process, guard, output = None, None, None
        try:
            with theirs, contextlib.ExitStack() as stack:
                stderr = None
                if self._settings.log_format == "json":
                    output, stderr = logged_pipe()
                    stack.enter_context(stderr)
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # Ctrl-C is for the API, which lets requests come to their end
                )
            self.process_id = process.pid
            guard = asyncio.create_task(self._kill_if_silent(process))
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=wire.LONGEST_LINE)
            fault = await self._read(reader)
            return fault or described_exit(await exit_status(process))
        except (OSError, ValueError) as error:  # it could not be started, or sent what is no message
            return f"{type(error).__name__}: {error}"
        finally:
            if guard is not None:
                guard.cancel()
            if self._writer is not None:
                self._writer.close()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            if output is not None:
                await asyncio.wait(
                    {output}, timeout=LAST_WORDS
                )  # a process that it has started may still hold the pipe
                output.cancel()

    async def _kill_if_silent(self, process: asyncio.subprocess.Process) -> None:
        """A ready engine sends a message every second, unless a pass takes longer or never ends."""
        longest = self._settings.silence
        while self.ready is None or time.monotonic() - self._last_message < longest:
            await asyncio.sleep(longest / 4)
        logger.error("the engine said nothing for %.0f seconds: it is started again", longest)
        process.kill()

    async def _read(self, reader: asyncio.StreamReader) -> str | None:
        fault = None
        with contextlib.suppress(ConnectionError):  # the same as the end of its messages
            async for line in reader:
                message, self._last_message = wire.message(line), time.monotonic()
                if "progress" in message:
                    for progress in map(Progress.from_dict, message["progress"]):
                        if progress.finish_reason is not None:
                            self.on_finished(progress)
                        self._deliver(progress)
                elif "figures" in message:
                    self.figures = message["figures"]
                elif "ready" in message:
                    self.ready, self._was_ready = Ready(**message["ready"]), True
                    logger.info("the model is ready: %s", self.ready)
                elif "traceback" in message:
                    logger.error("the engine raised an error:\n%s", message["traceback"])
                elif "fault" in message:
                    fault = str(message["fault"])
        return fault

    def _deliver(self, progress: Progress) -> None:
        submission = self._submissions.get(progress.id)
        if progress.finish_reason is not None:
            self._forget(progress.id)
        if submission is not None:
            submission.put(progress)

    def _give_up_after(self, seconds: float, id: str) -> None:
        if (earlier := self._deadlines.get(id)) is not None:
            earlier.cancel()
        self._deadlines[id] = asyncio.get_running_loop().call_later(seconds, self._time_out, id)

    def _time_out(self, id: str) -> None:
        self._send({"cancel": id})
        self._deliver(Progress(id, finish_reason="deadline"))

    def _forget(self, id: str) -> Submission | None:
        if (late := self._deadlines.pop(id, None)) is not None:
            late.cancel()
        if (submission := self._submissions.pop(id, None)) is not None:
            self.places.add(submission.tenant, -1)
        return submission

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.line(message))


async def exit_status(process: asyncio.subprocess.Process) -> int:
    """Of a process that has closed its end of the wire; it must not take long over the rest."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_SECONDS)
    except TimeoutError:
        process.kill()
        return await process.wait()


def described_exit(status: int) -> str:
    return f"its process was ended by signal {-status}" if status < 0 else f"its process ended with status {status}"
