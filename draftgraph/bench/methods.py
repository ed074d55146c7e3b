"""What is timed: a mode of this library, or a method of another one."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from draftgraph import private
from draftgraph.bench import worker
from draftgraph.bench.runs import Record
from draftgraph.bench.stopwatch import Stopwatch, told
from draftgraph.bench.structures import LLAMA_METHODS, PEERS, VLLM_METHODS
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.ranks import rank_count
from draftgraph.errors import DraftGraphError, one_line
from draftgraph.files import writing
from draftgraph.generation import Request, context_window
from draftgraph.models.draft import save_plain
from draftgraph.models.faults import quiet_transformers
from draftgraph.pair import Pair
from draftgraph.text import encode

ELSEWHERE = "give --out a folder"
LOOKUP_TOKENS = 10  # as transformers' own documentation has it
CONSTANT = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0}
DRAFTED = 5  # tokens, as vLLM's own documentation has it
VLLM_LOOKUP_TOKENS = 4
ROOM = 64  # tokens behind the longest answer, which drafts may reach into
PATIENCE = 900.0  # seconds for one answer of the worker; the first waits for weights and compiling
GPU_SHARE = 0.8  # of the free memory, for all methods of vLLM together
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ERROR = re.compile(r"\b(\w*(?:Error|Exception|error loading model): .+)")
NO_REASON = re.compile("initialization failed|Failed to init")  # of an engine that has logged what it was


class MethodFailed(DraftGraphError):
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
    more: Record = field(default_factory=dict)  # that the library tells of it

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

    @abstractmethod
    def prepare(self, prompt: str) -> Record:
        """Load and start what is needed for prompts of this length at most; return the name of the library."""

    @abstractmethod
    def answer(self, prompt: str) -> Answer: ...

    def warm_up(self, prompt: str) -> Record:
        self.watch.meters.begin()
        start = time.perf_counter()
        with failing():
            if rank_count(self.pair.target) > 1:
                raise MethodFailed("other libraries are not given a target that is split over several processes")
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
            **self.compare(prompt, answer.tokens, plain),
            **taken,
            **answer.more,
            "tokens": answer.tokens,
        }

    def compare(self, prompt: str, tokens: list[int], plain: Sequence[int] | None) -> Record:
        return self.watch.compare(prompt, tokens, plain)

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
    its own: those of the `lender`, which is the target before it was inflated. `gguf` is the target's own file."""

    def __init__(self, pair: Pair, lender: Any, place: Path, gguf: Path | None = None) -> None:
        self._pair, self._lender, self._place, self.gguf = pair, lender, place, gguf
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
        if self._pair.draft_tokenizer is not None:
            raise MethodFailed("the draft has another tokenizer")
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
        taken = ("temperature", "top_p", "max_new_tokens") if self.arguments.get("temperature") else ("max_new_tokens",)
        self.given = {name: self.arguments[name] for name in taken if self.arguments.get(name) is not None} | more
        self.given["do_sample"] = "temperature" in self.given

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
        if self.pair.draft_tokenizer is not None:
            self.given |= {"tokenizer": self.pair.tokenizer, "assistant_tokenizer": self.pair.draft_tokenizer}
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


class Elsewhere(Peer):
    """A library in an environment of its own, stopped while others are timed: its idle processes take time too."""

    library: str  # as the worker and its option are called

    def __init__(self, name: str, watch: Stopwatch, exports: Exports, python: str | None) -> None:
        super().__init__(name, watch)
        self._exports, self._python = exports, python
        self._device = watch.meters.device
        self._worker: Worker | None = None

    @abstractmethod
    def options(self, length: int) -> Record:
        """What its worker starts with, for texts of this length at most."""

    @abstractmethod
    def sampling(self, request: Request) -> Record:
        """What `generate` would make of the settings, defaults of the model included, in the words of the library."""

    def prepare(self, prompt: str) -> Record:
        if self._python is None:
            raise MethodFailed(f"no environment with {self.library} is named: give its python, --{self.library} PYTHON")
        length = self.request(prompt).max_length + ROOM
        options = self.options(min(length, context_window(self.pair.target) or length))
        self._worker = Worker(self.library, self._python, self._exports.folder / f"{self.name}.log", self._device)
        return self._worker.ask({"library": self.library} | options)

    def request(self, prompt: str) -> Request:
        return self.pair.request(prompt, **{name: one for name, one in self.arguments.items() if name != "seed"})

    def answer(self, prompt: str) -> Answer:
        request = self.request(prompt)
        ids = request.input_ids[0].tolist()
        sampling = self.sampling(request) | {"max_tokens": request.max_length - len(ids)}
        assert self._worker is not None, "it was warmed up"
        given = self._worker.ask({"prompt": ids, "sampling": sampling})
        return Answer(given.pop("tokens"), 1, given.pop("first_seconds"), given.pop("seconds"), given)

    def taken(self) -> Record:
        """Energy is counted for the whole device, memory only for this process, in which it does not run."""
        return {name: value for name, value in super().taken().items() if name == "joules"}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class Vllm(Elsewhere):
    """`vllm.LLM`, one prompt at a time, or so many `sequences`; `sharing` methods of it are in memory together."""

    library = "vllm"

    def __init__(
        self,
        name: str,
        watch: Stopwatch,
        exports: Exports,
        python: str | None,
        sequences: int = 1,
        sharing: int = len(VLLM_METHODS),
    ) -> None:
        super().__init__(name, watch, exports, python)
        self._sequences = sequences
        self._on_cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if self._on_cuda else (0, 1)
        self._gpu_share = free / total * GPU_SHARE / sharing

    def options(self, length: int) -> Record:
        options: Record = {"gpu_memory_utilization": self._gpu_share} if self._on_cuda else {}
        if self.name == "vllm-ngram":
            options["speculative_config"] = {"method": "ngram", "prompt_lookup_max": VLLM_LOOKUP_TOKENS}
        if self.name.startswith("vllm-draft"):
            options["speculative_config"] = {"method": "draft_model", "model": str(self._exports.draft)}
        if self.name != "vllm":
            options["speculative_config"]["num_speculative_tokens"] = int(self.name.partition("draft-")[2] or DRAFTED)
        return options | {
            "model": str(self._exports.target),
            "dtype": str(self.pair.target.dtype).removeprefix("torch."),
            "max_model_len": length,
            "max_num_seqs": self._sequences,
            "enable_prefix_caching": False,  # a prompt that is repeated would have no prefill
            "disable_log_stats": False,  # they tell when the first token came
        }

    def sampling(self, request: Request) -> Record:
        """Texts end with the target's end tokens alone."""
        ends = {"ignore_eos": True, "stop_token_ids": sorted(request.eos_ids), "detokenize": False}
        return sampling_of(request, self.arguments) | ends

    def answer_all(self, load: Record, prompt: str) -> Record:
        """Answers of the same length to a load of prompts, sampled as for this one: see `worker.drive`."""
        sampling = self.sampling(self.request(prompt)) | {"stop_token_ids": []}
        assert self._worker is not None, "it was prepared"
        return self._worker.ask({"load": load, "sampling": sampling | {"max_tokens": self.arguments["max_new_tokens"]}})


class Llama(Elsewhere):
    """llama.cpp, through xllamacpp, on the target's own GGUF file: texts end with the end tokens of that."""

    library = "llama"

    def options(self, length: int) -> Record:
        if self._exports.gguf is None or self._device.type != "cpu":
            raise MethodFailed("llama.cpp takes a GGUF file as the target, on a CPU and not inflated")
        drafts = self.name.partition("-")[2] or None
        threads = torch.get_num_threads()
        return {"model": str(self._exports.gguf), "drafts": drafts, "context": length, "threads": threads}

    def sampling(self, request: Request) -> Record:
        """Without limits of its own; where `generate` may not end a text early, it goes on as well."""
        sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | sampling_of(request, self.arguments)
        sampling |= {"repeat_penalty": sampling.pop("repetition_penalty", 1.0), "repeat_last_n": request.max_length}
        return sampling | {"ignore_eos": bool(request.config.min_new_tokens)}

    def compare(self, prompt: str, tokens: list[int], plain: Sequence[int] | None) -> Record:
        """It computes with quantised numbers, so the same tokens are not expected: equal ones are only counted."""
        claims = plain is not None and not self.arguments.get("temperature")
        return told(tokens, None) | {"same": None} | ({"equal": tokens == plain} if claims else {})


class Worker:
    """`worker.py` in another environment."""

    def __init__(self, library: str, python: str, log: Path, device: torch.device) -> None:
        self._library, self._log = library, log
        try:
            with log.open("w") as stream:
                self._process = subprocess.Popen(
                    [python, worker.__file__],
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
            silent = f"{self._library} gave no answer in {PATIENCE:g} seconds"
            ended = f"the worker of {self._library} ended" if timer.is_alive() else silent
            timer.cancel()
            self._send(signal.SIGSTOP)
        answer: Record = json.loads(line) if line else {"error": ended}
        if "error" in answer:
            raise MethodFailed(self._reason(str(answer["error"])))
        return answer

    def _reason(self, said: str) -> str:
        """The message, or the last error in the log where that is more specific."""
        logged = ERROR.findall(self._log.read_text(errors="replace")) if self._log.exists() else []
        causes = [line for line in logged if not NO_REASON.search(line)]
        vague = NO_REASON.search(said) or "Error: " not in said
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


def sampling_of(request: Request, arguments: Mapping[str, Any]) -> Record:
    """The settings that are not None, under the names that most libraries have for them."""
    config, sampling = request.config, {"temperature": 0.0}
    names = ("repetition_penalty", "top_p", "top_k", "min_p") if request.samples else ("repetition_penalty",)
    sampling |= {name: value for name in names if (value := getattr(config, name)) is not None}
    if request.samples:
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


def method_named(name: str, watch: Stopwatch, exports: Exports, pythons: Mapping[str, str | None]) -> Method:
    """The mode or method of this name; those of vLLM and llama.cpp run with the pythons that are named for them."""
    if name not in PEERS:
        return Method(name, watch)
    if name in VLLM_METHODS:
        return Vllm(name, watch, exports, pythons["vllm"])
    if name in LLAMA_METHODS:
        return Llama(name, watch, exports, pythons["llama"] or sys.executable)
    if name.startswith("hf-assisted"):
        return Assisted(name, watch, exports, **CONSTANT if name.endswith("-constant") else {})
    if name == "hf-static":
        return Static(name, watch)
    return Generate(name, watch, **{"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {})
