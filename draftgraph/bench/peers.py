"""The same prompts with the methods of `transformers` itself, for comparison."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from draftgraph.bench.runs import Record
from draftgraph.text import encode

if TYPE_CHECKING:
    from draftgraph.pair import Pair

LOOKUP_TOKENS = 10  # as transformers' own documentation has it
WARM_UP_TOKENS = 8


class Timer:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, tokens: Any) -> None:
        self.arrivals.append((time.perf_counter(), int(tokens.numel())))

    def end(self) -> None:
        self.arrivals.append((time.perf_counter(), 0))


def methods(pair: Pair) -> dict[str, dict[str, Any]]:
    """What `generate` can do with this pair: arguments by name. It takes no draft with a reduced vocabulary."""
    found: dict[str, dict[str, Any]] = {
        "generate": {},
        "generate, prompt lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    }
    if pair.draft is not None and pair.draft is not pair.target and pair.decoder.draft_vocabulary.written is None:
        found["generate, assistant model"] = {"assistant_model": pair.draft}
    return found


def timed(pair: Pair, method: str, prompt: str, arguments: Mapping[str, Any], plain: list[int] | None) -> Record:
    """One answer. `generate` may refuse a method for this pair: what it says is a result as well."""
    given = {name: value for name, value in arguments.items() if name != "seed" and value is not None}
    given |= methods(pair)[method] | {"do_sample": bool(arguments.get("temperature"))}
    if not given["do_sample"]:
        given = {name: value for name, value in given.items() if name not in ("temperature", "top_p")}
    ids = torch.tensor([encode(pair.tokenizer, prompt)], device=pair.target.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(arguments.get("seed", 0))
            pair.target.generate(**inputs, **given | {"max_new_tokens": WARM_UP_TOKENS})
            timer, start = Timer(), time.perf_counter()
            sequences = pair.target.generate(**inputs, **given, streamer=timer)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"error": f"{type(error).__name__}: {reason}"}
    tokens = sequences[0, ids.shape[1] :].tolist()
    (begun, first), (ended, _) = timer.arrivals[1], timer.arrivals[-1]  # the prompt comes before all
    decoded = max(len(tokens) - first, 1)
    return {
        "new_tokens": len(tokens),
        "ms_per_token": 1000 * (ended - begun) / decoded,
        "first_token_seconds": begun - start,
        "same": None if given["do_sample"] or plain is None else tokens == plain,
    }
