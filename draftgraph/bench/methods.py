"""What is timed: a mode of this library, or a method of another one."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from draftgraph import private
from draftgraph.bench import vllm_worker
from draftgraph.bench.runs import Record
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.bench.structures import PEERS, VLLM_METHODS
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import DraftGraphError, one_line
from draftgraph.files import writing
from draftgraph.generation import Request, context_window, prepare
from draftgraph.models.draft import save_plain
from draftgraph.models.faults import quiet_transformers
from draftgraph.pair import Pair
from draftgraph.text import encode

ELSEWHERE = "give --out a folder"
LOOKUP_TOKENS = 10  # as transformers' own documentation has it
CONSTANT = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0}
DRAFTED = 5  # tokens, as vLLM's own documentation has it
VLLM_LOOKUP_TOKENS = 4
ROOM = 16  # tokens behind the longest answer, which drafts may reach into
PATIENCE = 900.0  # seconds for one answer of the worker; the first waits for weights and compiling
GPU_SHARE = 0.8  # of the free memory, for all methods of vLLM together
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
NO_REASON = "initialization failed"  # of its engine or worker: they have logged what it was


class MethodFailed(Exception):
    """Why a method of another library cannot answer, in one line."""


class Method:
    """A mode of this library: its errors are not caught."""

    def __init__(self, name: str, watch: Stopwatch) -> None:
        self.name, self.watch = name, watch

    def warm_up(self, prompt: str) -> Record:
        """Do all one-time work, on the longest prompt."""
        return self.watch.warm_up(self.name, prompt)

    def run(self, prompt: str, plain: Sequence[int] | None) -> Record:
        """An answer and its figures, compared with the tokens of plain decoding where they are known."""
        return self.watch.run(self.name, prompt, plain)

    def close(self) -> None:
        """Free processes and memory."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    first: int  # tokens that came first, at once
    first_seconds: float  # from the prompt to those
    seconds: float  # from there to the end

    @property
    def ms_per_token(self) -> float:
        """Without prefill; an answer that arrived at once is timed whole."""
        if len(self.tokens) > self.first:
            return 1000 * self.seconds / (len(self.tokens) - self.first)
        return 1000 * self.first_seconds / max(len(self.tokens), 1)


class Peer(Method, ABC):
    """A method of another library, timed as ours are. It may refuse a pair: its error message is a result as well."""

    def __init__(self, name: str, watch: Stopwatch) -> None:
        super().__init__(name, watch)
        self.pair, self.arguments = watch.pair, watch.arguments
        taken = ("temperature", "top_p", "max_new_tokens") if self.arguments.get("temperature") else ("max_new_tokens",)
        self.given = {name: self.arguments[name] for name in taken if self.arguments.get(name) is not None}
        self.given["do_sample"] = "temperature" in self.given

    @abstractmethod
    def prepare(self, prompt: str) -> Record:
        """Load and start what is needed for prompts of this length at most; return the name of the library."""

    @abstractmethod
    def answer(self, prompt: str) -> Answer: ...

    def warm_up(self, prompt: str) -> Record:
        self.watch.meters.begin()
        start = time.perf_counter()
        with failing():
            about = self.prepare(prompt)
            self.answer(prompt)
        seconds = time.perf_counter() - start
        return {"mode": self.name, "prices": None, "seconds": seconds} | about | self.taken()

    def run(self, prompt: str, plain: Sequence[int] | None) -> Record:
        self.watch.meters.begin()
        with failing():
            answer = self.answer(prompt)
        taken = self.taken()
        return {
            "prompt_tokens": len(self.ids(prompt)),
            "new_tokens": len(answer.tokens),
            "seconds": answer.seconds,
            "ms_per_token": answer.ms_per_token,
            "first_token_seconds": answer.first_seconds,
            **self.watch.compare(prompt, answer.tokens, plain),
            **taken,
            "tokens": answer.tokens,
        }

    def taken(self) -> Record:
        return self.watch.meters.read()

    def ids(self, prompt: str) -> list[int]:
        return encode(self.pair.tokenizer, prompt)


@contextmanager
def failing() -> Iterator[None]:
    """Turn any error of another library into MethodFailed."""
    try:
        yield
    except MethodFailed:
        raise
    except DraftGraphError as error:
        raise MethodFailed(one_line(error)) from error
    except Exception as error:
        raise MethodFailed(f"{type(error).__name__}: {one_line(error)}") from error


class Exports:
    """Written on first use, under `place`. A draft that borrows from its target gets an embedding and output matrix of
    its own: those of the `lender`, which is the target before it was inflated."""

    def __init__(self, pair: Pair, lender: Any, place: Path) -> None:
        self._pair, self._lender, self._place = pair, lender, place
        self._folder: TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        if self._folder is None:
            with writing("models for other libraries", self._place, ELSEWHERE):
                self._folder = TemporaryDirectory(prefix=".models-", dir=self._place)
        return Path(self._folder.name)

    @cached_property
    def target(self) -> Path:
        return self._saved(self._pair.target, self.folder / "target")

    @cached_property
    def draft(self) -> Path:
        draft, folder = self._draft(), self.folder / "draft"
        if not self._borrows:
            return self._saved(draft, folder)
        save_plain(draft, self._lender, self._pair.tokenizer, folder)
        return folder

    @cached_property
    def assistant(self) -> Any:
        """The draft as `generate` takes it: the draft itself, unless it borrows matrices of the target."""
        draft = self._draft()
        if not self._borrows:
            return draft
        with quiet_transformers():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(self.draft, dtype=draft.dtype)
        return loaded.to(draft.device)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _borrows(self) -> bool:
        lent = unwrapped(self._lender).get_input_embeddings().weight
        return bool(self._draft().get_input_embeddings().weight.data_ptr() == lent.data_ptr())

    def _draft(self) -> Any:
        draft = self._pair.draft
        if draft is None or draft is self._lender:
            raise MethodFailed("this pair has no draft model" if draft is None else "the target drafts for itself")
        return draft

    def _saved(self, model: Any, folder: Path) -> Path:
        with writing("a model for other libraries", folder, ELSEWHERE), quiet_transformers():
            model.save_pretrained(folder)
            self._pair.tokenizer.save_pretrained(folder)
        return folder


class Timer:
    """A streamer that records when tokens arrive."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, tokens: Any) -> None:
        self.arrivals.append((time.perf_counter(), int(tokens.numel())))

    def end(self) -> None:
        self.arrivals.append((time.perf_counter(), 0))


class Generate(Peer):
    """`generate` with more arguments, or none."""

    def __init__(self, name: str, watch: Stopwatch, **more: Any) -> None:
        super().__init__(name, watch)
        self.given |= more

    def prepare(self, prompt: str) -> Record:
        return {"library": f"transformers {transformers.__version__}"}

    def answer(self, prompt: str) -> Answer:
        ids = torch.tensor([self.ids(prompt)], device=self.pair.target.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with quiet_transformers(), torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.arguments.get("seed", 0))
            timer, start = Timer(), time.perf_counter()
            sequences = self.pair.target.generate(**inputs, **self.given, streamer=timer)
        (begun, first), (ended, _) = timer.arrivals[1], timer.arrivals[-1]  # the prompt comes before all
        return Answer(sequences[0, ids.shape[1] :].tolist(), first, begun - start, ended - begun)


class Assisted(Generate):
    """With an assistant model, and settings of its own, some of which `generate` changes from call to call."""

    def __init__(self, name: str, watch: Stopwatch, exports: Exports, **settings: Any) -> None:
        super().__init__(name, watch)
        self._exports, self._settings = exports, settings

    def prepare(self, prompt: str) -> Record:
        self._assistant = self._exports.assistant
        self._config = copy.deepcopy(self._assistant.generation_config)
        for name, value in self._settings.items():
            setattr(self._config, name, value)
        self.given["assistant_model"] = self._assistant
        return super().prepare(prompt)

    def answer(self, prompt: str) -> Answer:
        original, self._assistant.generation_config = self._assistant.generation_config, self._config
        try:
            return super().answer(prompt)
        finally:
            self._assistant.generation_config = original


class Static(Generate):
    """With one static cache for all prompts: `generate` would make, and compile for, one of every length."""

    def prepare(self, prompt: str) -> Record:
        length = len(self.ids(prompt)) + self.arguments["max_new_tokens"]
        compiling = transformers.CompileConfig()
        private.compile_everywhere(compiling)  # by itself it compiles on GPUs alone
        cache = transformers.StaticCache(config=self.pair.target.config, max_cache_len=length)
        self.given |= {"past_key_values": cache, "compile_config": compiling}
        return super().prepare(prompt)

    def answer(self, prompt: str) -> Answer:
        self.given["past_key_values"].reset()
        return super().answer(prompt)


class Vllm(Peer):
    """`vllm.LLM`, which is stopped while others are timed: its idle processes take time too."""

    def __init__(self, name: str, watch: Stopwatch, exports: Exports, python: str | None) -> None:
        super().__init__(name, watch)
        self._exports, self._python = exports, python
        self._on_cuda = watch.meters.device.type == "cuda"
        free, total = torch.cuda.mem_get_info(watch.meters.device) if self._on_cuda else (0, 1)
        self._gpu_share = free / total * GPU_SHARE / len(VLLM_METHODS)
        self._worker: Worker | None = None

    def prepare(self, prompt: str) -> Record:
        if self._python is None:
            raise MethodFailed("no environment with vllm is named: give its python, --vllm PYTHON")
        options = self.options(len(self.ids(prompt)))
        self._worker = Worker(self._python, self._exports.folder / f"{self.name}.log", self.watch.meters.device)
        return {"library": f"vllm {self._worker.ask(options)['version']}"}

    def options(self, longest: int) -> Record:
        """Arguments of `vllm.LLM` for one prompt at a time, with `longest` tokens at most."""
        target = self.pair.target
        length = longest + self.arguments["max_new_tokens"] + ROOM
        options: Record = {"gpu_memory_utilization": self._gpu_share} if self._on_cuda else {}
        if self.name == "vllm-ngram":
            options["speculative_config"] = {"method": "ngram", "prompt_lookup_max": VLLM_LOOKUP_TOKENS}
        if self.name == "vllm-draft":
            options["speculative_config"] = {"method": "draft_model", "model": str(self._exports.draft)}
        if self.name != "vllm":
            options["speculative_config"]["num_speculative_tokens"] = DRAFTED
        return options | {
            "model": str(self._exports.target),
            "dtype": str(target.dtype).removeprefix("torch."),
            "max_model_len": min(length, context_window(target) or length),
            "max_num_seqs": 1,
            "enable_prefix_caching": False,  # a prompt that is repeated would have no prefill
            "disable_log_stats": False,  # they tell when the first token came
        }

    def answer(self, prompt: str) -> Answer:
        ids = self.ids(prompt)
        # What `generate` would make of the settings: defaults of the model included.
        request = prepare(self.pair.target, torch.tensor([ids]), **self.given)
        sampling = sampling_of(request, self.arguments) | {"max_tokens": self.arguments["max_new_tokens"]}
        assert self._worker is not None, "it was warmed up"
        given = self._worker.ask({"prompt": ids, "sampling": sampling})
        return Answer(given["tokens"], 1, given["first_seconds"], given["seconds"])

    def taken(self) -> Record:
        """Energy is counted for the whole device, memory only for this process, in which vLLM does not run."""
        return {name: value for name, value in super().taken().items() if name == "joules"}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class Worker:
    """`vllm_worker.py` in another environment."""

    def __init__(self, python: str, log: Path, device: torch.device) -> None:
        self._log = log
        try:
            with log.open("w") as stream:
                self._process = subprocess.Popen(
                    [python, vllm_worker.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stream,
                    text=True,
                    encoding="utf-8",
                    env=QUIET | os.environ | same_gpu(device),
                    start_new_session=True,  # so that it can be ended with all that it started
                )
        except OSError as error:
            raise MethodFailed(f"{python} cannot be run: {error.strerror or error}") from error

    def ask(self, question: Record) -> Record:
        """Send one line and return its answer; a worker that takes too long is killed."""
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
        """The message, or the last error in the log where that is more specific."""
        logged = ERROR.findall(self._log.read_text(errors="replace")) if self._log.exists() else []
        causes = [line for line in logged if NO_REASON not in line]
        vague = NO_REASON in said or "Error: " not in said
        return (causes[-1] if vague and causes else said).strip().splitlines()[0][:240]

    def close(self) -> None:
        """Close its input and wait for it to end; kill it after 30 seconds."""
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
        """To the worker and its child processes, if they still run."""
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


def same_gpu(device: torch.device) -> dict[str, str]:
    """The environment that selects this GPU. On a CPU vLLM binds threads to cores by itself: without that, `ngram`
    took five times as long."""
    if device.type != "cuda":
        return {}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": visible[index] if visible else str(index)}


def method_named(name: str, watch: Stopwatch, exports: Exports, vllm: str | None) -> Method:
    """The mode or method of this name; those of vLLM run with the python `vllm`."""
    if name not in PEERS:
        return Method(name, watch)
    if name in VLLM_METHODS:
        return Vllm(name, watch, exports, vllm)
    if name.startswith("hf-assisted"):
        return Assisted(name, watch, exports, **CONSTANT if name.endswith("-constant") else {})
    if name == "hf-static":
        return Static(name, watch)
    return Generate(name, watch, **{"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {})
