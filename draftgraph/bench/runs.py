"""Measurements as JSON lines: appended one by one, so that a run that was stopped or killed goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from draftgraph.errors import UsageError

FILE = "runs.jsonl"
PLAIN = "off"
SPARE = 1.5  # times the usual time
Record = dict[str, Any]  # its "kind": configuration (the first one), session, warm-up, run, failed, rescored or scores


@dataclass
class Deadline:
    """A time limit: nothing is begun that would exceed it, by how long answers took so far."""

    seconds: float | None

    def __post_init__(self) -> None:
        self._end = None if self.seconds is None else time.monotonic() + self.seconds
        self._taken: list[float] = []  # seconds of an answer

    @property
    def left(self) -> float | None:
        """Seconds; None: there is no end."""
        return None if self._end is None else self._end - time.monotonic()

    @property
    def is_near(self) -> bool:
        """Whether an answer that takes as long as the slowest would be late."""
        return self.left is not None and self.left <= max(self._taken, default=0.0)

    def allows(self, answers: int) -> bool:
        """Whether there is time for so many, if they take as long as usual, and half as long again."""
        usual = median(self._taken) if self._taken else 0.0
        return self.left is None or SPARE * answers * usual < self.left

    @contextmanager
    def watch(self, answers: int = 1) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._taken.append((time.monotonic() - start) / answers)


class Place(NamedTuple):
    """Which measurement: the key of a run."""

    task: str
    prompt: int
    mode: str
    repeat: int

    @classmethod
    def of(cls, run: Record) -> Place:
        return cls(*(run[name] for name in cls._fields))


def all_places(tasks: Mapping[str, Sequence[str]], modes: Sequence[str], repeats: int) -> list[Place]:
    """All modes in turn for every prompt, and all prompts before any is repeated: a drifting machine hits all alike."""
    longest = max(map(len, tasks.values()))
    return [
        Place(task, number, mode, repeat)
        for repeat in range(repeats)
        for number in range(longest)
        for task, prompts in tasks.items()
        if number < len(prompts)
        for mode in modes
    ]


def read_records(folder: Path) -> list[Record]:
    """The records of a folder, the configuration first."""
    file = folder / FILE
    try:
        records = records_in(file)
    except OSError as error:
        raise UsageError(f"there are no measurements in {folder}: name the --out folder of bench run") from error
    if not of_kind(records, "run") and not of_kind(records, "load"):
        raise UsageError(f"no measurement in {file} is finished: run the same bench command again")
    return records


def records_in(file: Path) -> list[Record]:
    return parsed(file, whole_lines(file.read_bytes()))


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def last_session(records: Sequence[Record]) -> int:
    """The index of the record with which the last call began."""
    return max((place for place, record in enumerate(records) if record["kind"] == "session"), default=0)


def can_be_rescored(run: Record) -> bool:
    """Only first runs keep their tokens; sampled answers of other libraries are not compared."""
    return "tokens" in run and run["same"] is not None


class Runs:
    """The file of one configuration, open to be appended to."""

    def __init__(self, folder: Path, configuration: Record) -> None:
        file = folder / FILE
        self._stream = file.open("r+b" if file.exists() else "x+b")
        try:
            kept = whole_lines(self._stream.read())
            self.records = parsed(file, kept)
            if self.records:
                refuse_another(folder, self.records[0], configuration)
        except BaseException:
            self._stream.close()
            raise
        self._stream.truncate(len(kept))
        self._stream.seek(len(kept))
        if not self.records:
            self.append("configuration", configuration)

    def append(self, kind: str, record: Record) -> None:
        """Write a record; it is on disk when this returns."""
        self.records.append({"kind": kind} | record)
        self._stream.write(json.dumps(self.records[-1]).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    @property
    def measured(self) -> dict[Place, Record]:
        return {Place.of(run): run for run in of_kind(self.records, "run")}

    @property
    def plain(self) -> dict[tuple[str, int], list[int]]:
        """The tokens of plain decoding, by task and prompt."""
        answers = ((place, run) for place, run in self.measured.items() if place.mode == PLAIN and "tokens" in run)
        return {(place.task, place.prompt): run["tokens"] for place, run in answers}

    def refuse_other_prompts(self, tasks: Mapping[str, Sequence[str]]) -> None:
        for run in of_kind(self.records, "run"):
            prompts = tasks.get(run["task"], ())
            if run["prompt"] < len(prompts) and run["prompt_digest"] != digest(prompts[run["prompt"]]):
                raise UsageError(
                    f"prompt {run['prompt'] + 1} of {run['task']} is not the one that was measured: name another --out"
                )

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()


def whole_lines(content: bytes) -> bytes:
    """The content without an incomplete last line, which a killed run leaves."""
    return content[: content.rfind(b"\n") + 1]


def parsed(file: Path, content: bytes) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = json.loads(line)
            known = isinstance(record["kind"], str)
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known or (number == 1 and record["kind"] != "configuration"):
            raise UsageError(f"{file}, line {number} is damaged: remove that line, or name another folder")
        records.append(record)
    return records


def refuse_another(folder: Path, known: Record, configuration: Record) -> None:
    for name, value in json.loads(json.dumps(configuration)).items():
        if known.get(name) != value:
            raise UsageError(
                f"{folder} holds measurements with {name.replace('_', ' ')} {shown(known.get(name))}, "
                f"not {shown(value)}: name another --out"
            )


def shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def digest(content: Any) -> str:
    return sha256(json.dumps(content).encode()).hexdigest()[:16]
