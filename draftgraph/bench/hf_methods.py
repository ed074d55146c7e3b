"""Methods of `transformers`: its own `generate`, plain, with an assistant, with prompt lookup, with a static cache."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import transformers

from draftgraph import private
from draftgraph.bench.exports import Exports
from draftgraph.bench.methods import Answer, Peer
from draftgraph.bench.runs import Record
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.models.progress import quiet_transformers

LOOKUP_TOKENS = 10  # as transformers' own documentation has it
CONSTANT = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0}


class Timer:
    """A streamer that notes when tokens come."""

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
        samples = bool(self.arguments.get("temperature"))
        taken = ("temperature", "top_p", "max_new_tokens") if samples else ("max_new_tokens",)
        given = {name: self.arguments[name] for name in taken if self.arguments.get(name) is not None}
        self.given: dict[str, Any] = given | {"do_sample": samples} | more

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


def hf_method(name: str, watch: Stopwatch, exports: Exports) -> Peer:
    """The method of this name."""
    if name.startswith("hf-assisted"):
        return Assisted(name, watch, exports, **CONSTANT if name.endswith("-constant") else {})
    if name == "hf-static":
        return Static(name, watch)
    return Generate(name, watch, **{"prompt_lookup_num_tokens": LOOKUP_TOKENS} if name == "hf-lookup" else {})
