"""Methods of vLLM, which pins its own torch: each in a process of its own, of an environment that the user names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftgraph.bench import vllm_worker
from draftgraph.bench.exports import Exports
from draftgraph.bench.methods import Answer, MethodFailed, Peer
from draftgraph.bench.runs import Record
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.bench.structures import VLLM_METHODS
from draftgraph.generation import Request, context_window, prepare

DRAFTED = 5  # tokens, as vLLM's own documentation has it
LOOKUP_TOKENS = 4
ROOM = 16  # tokens behind the longest answer, which drafts may reach into
PATIENCE = 900.0  # seconds for one answer of the worker; the first waits for weights and compiling
GPU_SHARE = 0.8  # of the free memory, for all methods of vLLM together
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
NO_REASON = "initialization failed"  # of its engine or worker: they have logged what it was


class Vllm(Peer):
    """`vllm.LLM`, which is stopped while others are timed: its idle processes take time too."""

    def __init__(self, name: str, watch: Stopwatch, exports: Exports, python: str | None) -> None:
        super().__init__(name, watch)
        self._exports, self._python = exports, python
        self._gpu_share = free_share(watch.meters.device) * GPU_SHARE / len(VLLM_METHODS)
        self._worker: Worker | None = None

    def prepare(self, prompt: str) -> Record:
        if self._python is None:
            raise MethodFailed("no environment with vllm is named: give its python, --vllm PYTHON")
        options = self.options(len(self.ids(prompt)))
        self._worker = Worker(self._python, self._exports.folder / f"{self.name}.log", self.watch.meters.device)
        return {"library": f"vllm {self._worker.ask(options)['version']}"}

    def options(self, longest: int) -> Record:
        """Arguments of `vllm.LLM` for prompts of so many tokens at most, one at a time."""
        target = self.pair.target
        length = longest + self.arguments["max_new_tokens"] + ROOM
        options: Record = {
            "model": str(self._exports.target),
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_model_len": min(length, context_window(target) or length),
            "max_num_seqs": 1,
            "enable_prefix_caching": False,  # a prompt that is repeated would have no prefill
            "disable_log_stats": False,  # they tell when the first token came
        }
        if self.watch.meters.device.type == "cuda":
            options["gpu_memory_utilization"] = self._gpu_share
        if self.name == "vllm-ngram":
            lookup = {"method": "ngram", "prompt_lookup_max": LOOKUP_TOKENS}
            options["speculative_config"] = lookup | {"num_speculative_tokens": DRAFTED}
        if self.name == "vllm-draft":
            draft = {"method": "draft_model", "model": str(self._exports.draft)}
            options["speculative_config"] = draft | {"num_speculative_tokens": DRAFTED}
        return options

    def answer(self, prompt: str) -> Answer:
        ids = self.ids(prompt)
        sampling = sampling_of(self.request(ids), self.arguments)
        sampling |= {"max_tokens": self.arguments["max_new_tokens"]}
        assert self._worker is not None, "it was warmed up"
        given = self._worker.ask({"prompt": ids, "sampling": sampling})
        return Answer(given["tokens"], 1, given["first_seconds"], given["seconds"])

    def taken(self) -> Record:
        """The device counts whoever uses it; what is known of memory is that of this process."""
        return {name: value for name, value in super().taken().items() if name == "joules"}

    def request(self, ids: list[int]) -> Request:
        """What `generate` would make of the settings: defaults of the model included."""
        given = {name: self.arguments.get(name) for name in ("temperature", "top_p", "max_new_tokens")}
        given = {name: value for name, value in given.items() if value is not None}
        return prepare(self.pair.target, torch.tensor([ids]), do_sample="temperature" in given, **given)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class Worker:
    """`vllm_worker.py` in another environment."""

    def __init__(self, python: str, log: Path, device: torch.device) -> None:
        self._log = log
        command = [python, str(Path(vllm_worker.__file__))]
        environment = QUIET | os.environ | surroundings(device)
        try:
            with log.open("w") as stream:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    text=True,
                    encoding="utf-8",
                    env=environment,
                    start_new_session=True,  # so that it can be ended with all that it started
                )
        except OSError as error:
            raise MethodFailed(f"{python} cannot be run: {error.strerror or error}") from error

    def ask(self, question: Record) -> Record:
        """The answer to one line; a worker that is silent for too long is ended."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        line, timer = "", threading.Timer(PATIENCE, self._send, [signal.SIGKILL])
        timer.start()
        self._send(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            pass
        finally:
            ended = "the worker of vllm ended" if timer.is_alive() else f"vllm gave no answer in {PATIENCE:g} seconds"
            timer.cancel()
            self._send(signal.SIGSTOP)
        answer: Record = json.loads(line) if line else {"error": ended}
        if "error" in answer:
            raise MethodFailed(self._reason(str(answer["error"])))
        return answer

    def _reason(self, said: str) -> str:
        """What was said, or the last error in the log where that says more."""
        logged = ERROR.findall(self._log.read_text(errors="replace")) if self._log.exists() else []
        causes = [line for line in logged if NO_REASON not in line]
        vague = NO_REASON in said or "Error: " not in said
        return (causes[-1] if vague and causes else said).strip().splitlines()[0][:240]

    def close(self) -> None:
        """Lets it end, and what it started."""
        process = self._process
        self._send(signal.SIGCONT)
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # it has ended, and not read all
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            process.wait()
        process.stdout.close()

    def _send(self, kind: signal.Signals) -> None:
        """To it and all that it started; nothing to those that have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, kind)


def sampling_of(request: Request, arguments: Any) -> Record:
    """Arguments of vLLM's `SamplingParams` that mean the same. Texts end with the target's end tokens alone."""
    config, ends = request.config, sorted(request.eos_ids)
    sampling: Record = {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": ends, "detokenize": False}
    if config.repetition_penalty is not None:
        sampling["repetition_penalty"] = config.repetition_penalty
    if request.samples:
        taken = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p")}
        sampling |= {name: value for name, value in taken.items() if value is not None}
        sampling |= {"temperature": request.temperature, "seed": arguments.get("seed", 0)}
    return sampling


def surroundings(device: torch.device) -> dict[str, str]:
    """The same GPU. On a CPU it binds threads to cores by itself: kept from that, `ngram` took five times as long."""
    if device.type != "cuda":
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": visible[index] if visible else str(index)}


def free_share(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return free / total
