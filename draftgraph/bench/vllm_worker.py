"""Runs vLLM in an environment of its own: JSON lines in, JSON lines out. Needs nothing but vllm.

The first line holds the arguments of `vllm.LLM`, and `{"version": ...}` answers it. Every other line is a prompt,
`{"prompt": [token ids], "sampling": {arguments of SamplingParams}}`, answered with `{"tokens": [...], "first_seconds":
..., "seconds": ...}`: to the first token, and from there to the end. What goes wrong is answered with `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    answers = private_stdout()
    try:
        serve(answers)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def private_stdout() -> TextIO:
    """vLLM and its processes log to stdout: from now on that is stderr, and only answers go where it was."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO) -> None:
    options = json.loads(sys.stdin.readline())
    import vllm

    model = vllm.LLM(**options)
    say(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        say(answers, timed(model, {"prompt_token_ids": asked["prompt"]}, vllm.SamplingParams(**asked["sampling"])))


def timed(model: Any, prompt: dict[str, list[int]], sampling: Any) -> dict[str, Any]:
    """One answer, on the clock by which vLLM, in another process, tells when the first token came."""
    start = time.monotonic()
    output = model.generate(prompt, sampling, use_tqdm=False)[0]
    end = time.monotonic()
    first = output.metrics.first_token_ts
    return {"tokens": list(output.outputs[0].token_ids), "first_seconds": first - start, "seconds": end - first}


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":  # vLLM's own processes import this file
    main()
