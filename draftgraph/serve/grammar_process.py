"""Tries grammars for the API, in a process that the operating system ends where one takes too much: to compile a few
kilobytes can take minutes and gigabytes, or overflow the stack.

Started by `draftgraph.serve.grammars`. The first line that it reads describes a tokenizer, every other is a grammar.
It answers each with a line: what is wrong with the grammar, or how many seconds it took to compile.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from draftgraph.batching.grammar import check, matcher_of, vocabulary_from
from draftgraph.errors import UsageError
from draftgraph.serve import wire

MOST_SECONDS = 1  # of the processor, for one grammar
MOST_MEMORY = 256 << 20  # bytes, for one grammar
MOST_STACK = 4 << 20  # bytes: half of what the engine usually has


def main() -> None:
    lines = iter(sys.stdin.buffer)
    vocabulary = vocabulary_from(**wire.message(next(lines)))
    confine()
    answer({})
    for line in lines:
        answer(tried(wire.message(line), vocabulary))


def tried(grammar: dict[str, Any], vocabulary: Any) -> dict[str, Any]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + MOST_SECONDS)
    start = time.process_time()
    try:
        matcher = matcher_of(grammar, vocabulary)
        matcher.compute_bitmask()  # in which some take their time, and in others no token is left
        check(matcher)
    except UsageError as error:
        return {"error": str(error)}
    return {"seconds": time.process_time() - start}


def confine() -> None:
    """The tokenizer counts for nothing; what is said when the process is ended is of no use to anybody."""
    if (memory := Path("/proc/self/statm")).exists():
        data = int(memory.read_text().split()[5]) * resource.getpagesize()
        limit(resource.RLIMIT_DATA, data + MOST_MEMORY)
    limit(resource.RLIMIT_STACK, MOST_STACK)
    limit(resource.RLIMIT_CORE, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answer(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(wire.line(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
