"""Runs vLLM or llama.cpp in an environment of its own: JSON lines in, JSON lines out. Needs nothing but that library.

The first line names the library and has its options; the answer tells its version. Every other line is a prompt,
`{"prompt": [token ids], "sampling": {...}}`, answered with `{"tokens": [...], "first_seconds": ..., "seconds": ...}`:
to the first token, and from there to the end; llama.cpp tells more. A load, `{"load": {...}, "sampling": {...}}`, is
answered with what `drive` records. What goes wrong is answered with `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

Record = dict[str, Any]
Answers = dict[str, Callable[..., Record]]  # by what a question holds beside how to sample
Step = Callable[[], Iterable[tuple[int, list[int], bool]]]  # number, new tokens, whether that was the last of them
REMEMBERING = "ngram-mod"  # drafts from earlier answers, which would have it copy a prompt's repeats


def main() -> None:
    answers = private_stdout()
    try:
        serve(answers)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def private_stdout() -> TextIO:
    """Libraries and their processes log to stdout: from now on that is stderr, and only answers go where it was."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO) -> None:
    options = json.loads(sys.stdin.readline())
    about, able = LIBRARIES[options.pop("library")](**options)
    say(answers, about)
    for line in sys.stdin:
        asked = json.loads(line)
        kind = next(kind for kind in able if kind in asked)
        say(answers, able[kind](asked[kind], asked["sampling"]))


def say(answers: TextIO, answer: Record) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def drive(load: Record, add: Callable[[int, list[int]], object], step: Step) -> Record:
    """Asks an engine for answers to all prompts and records when their tokens came, in seconds since the start.

    A closed load is that of so many `clients`, each of which asks again once it is answered. An open one has
    `arrivals`, in seconds, whatever is answered by then: what finds as many under way as there are clients, or is kept
    from being asked in time by `step`, was due nevertheless.
    """
    prompts: Sequence[list[int]] = load["prompts"]
    clients: int = load["clients"]
    arrivals: Sequence[float] = load.get("arrivals") or [0.0] * len(prompts)
    is_open, due = "arrivals" in load, [0.0] * len(prompts)
    came: list[list[tuple[float, int]]] = [[] for _ in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    asked = unanswered = 0
    start, now = time.perf_counter(), 0.0
    while asked < len(prompts) or unanswered:
        now = time.perf_counter() - start
        while asked < len(prompts) and arrivals[asked] <= now and unanswered < clients:
            due[asked] = arrivals[asked] if is_open else now
            add(asked, prompts[asked])
            asked, unanswered = asked + 1, unanswered + 1
        if not unanswered:
            time.sleep(arrivals[asked] - now)
            continue
        found = list(step())
        now = time.perf_counter() - start
        for number, new, ended in found:
            if new:
                came[number].append((now, len(new)))
                tokens[number] += new
            unanswered -= ended
    return {"due": due, "came": came, "tokens": tokens, "seconds": now}


def start_vllm(**options: Any) -> tuple[Record, Answers]:
    import vllm

    model = vllm.LLM(**options)

    def answer(prompt: list[int], sampling: Record) -> Record:
        """On the clock by which vLLM, in another process, tells when the first token came."""
        start = time.monotonic()
        output = model.generate({"prompt_token_ids": prompt}, vllm.SamplingParams(**sampling), use_tqdm=False)[0]
        end = time.monotonic()
        first = output.metrics.first_token_ts
        return {"tokens": list(output.outputs[0].token_ids), "first_seconds": first - start, "seconds": end - first}

    def answer_all(load: Record, sampling: Record) -> Record:
        engine, given = model.llm_engine, vllm.SamplingParams(**sampling)
        known = [0] * len(load["prompts"])

        def add(number: int, prompt: list[int]) -> None:
            engine.add_request(str(number), {"prompt_token_ids": prompt}, given)

        def step() -> Iterable[tuple[int, list[int], bool]]:
            for output in engine.step():
                number, tokens = int(output.request_id), output.outputs[0].token_ids
                yield number, list(tokens[known[number] :]), output.finished
                known[number] = len(tokens)

        return drive(load, add, step)

    return {"library": f"vllm {vllm.__version__}"}, {"prompt": answer, "load": answer_all}


def start_llama(model: str, drafts: str | None, context: int, threads: int) -> tuple[Record, Answers]:
    """`drafts` is a kind of llama.cpp's speculation, as in ngram-simple."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = model, context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib, params.verbosity = 0, 1  # prompts that were read before are not kept; errors are logged
    if drafts is not None:
        kind = f"COMMON_SPECULATIVE_TYPE_{drafts.replace('-', '_').upper()}"
        params.speculative.types = [xllamacpp.common_speculative_type[kind]]
    start = time.monotonic()
    servers = [xllamacpp.Server(params)]
    about = {"library": f"llama.cpp (xllamacpp {xllamacpp.__version__})", "load_seconds": time.monotonic() - start}

    def answer(prompt: list[int], sampling: Record) -> Record:
        """By the clock of llama.cpp itself; its first token comes with the prompt, and every pass adds one."""
        if drafts == REMEMBERING:
            servers.clear()
            servers.append(xllamacpp.Server(params))
        told = {"cache_prompt": False, "return_tokens": True, "verbose": True}
        given = servers[0].handle_completions({"prompt": prompt} | sampling | told)
        if "error" in given:
            raise RuntimeError(given["error"]["message"])
        tokens, timings = given["__verbose"]["tokens"], given["timings"]
        return {
            "tokens": tokens,
            "first_seconds": timings["prompt_ms"] / 1000,
            "seconds": timings["predicted_ms"] / 1000,
            "steps": len(tokens) - timings.get("draft_n_accepted", 0),
            **memory(),
        }

    return about, {"prompt": answer}


def memory() -> Record:
    """The largest size of this process, where Linux tells it: `getrusage` would count the parent before the `exec`."""
    try:
        with open("/proc/self/status", encoding="utf-8") as stream:
            peak = next(line for line in stream if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return {}
    return {"resident_bytes": int(peak.split()[1]) * 1024}


LIBRARIES: dict[str, Callable[..., tuple[Record, Answers]]] = {"vllm": start_vllm, "llama": start_llama}

if __name__ == "__main__":  # vLLM's own processes import this file
    main()
