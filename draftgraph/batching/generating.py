"""`pair.generate` with a list of prompts: all of them together."""

from __future__ import annotations

from typing import Any

from draftgraph.batching.batch import TEXTS, Batch
from draftgraph.batching.text import Text
from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.decoder import fresh_seed
from draftgraph.engine.loan import unwrapped
from draftgraph.engine.pages import PAGE
from draftgraph.engine.static import StaticEngine
from draftgraph.errors import UsageError
from draftgraph.pair import Output, Pair
from draftgraph.rows import row_arguments


def generate_all(
    pair: Pair,
    prompts: list[str],
    *,
    seed: int | None = None,
    config: GraphConfig | None = None,
    logprobs: bool = False,
    streamer: Any = None,
    **arguments: Any,
) -> list[Output]:
    """The outputs in the order of the prompts, each as it would be alone."""
    if streamer is not None:
        raise UsageError("streamer works with one text at a time: pass one prompt")
    seed = fresh_seed() if seed is None else seed
    model, rows = unwrapped(pair.target), len(prompts)
    given = [row_arguments(model, arguments, row, rows) for row in range(rows)]
    if isinstance(pair.decoder.target_engine, StaticEngine):  # its passes are recorded for one text
        alone = {"seed": seed, "config": config, "logprobs": logprobs}
        return [pair.generate(prompt, **alone, **one) for prompt, one in zip(prompts, given, strict=True)]
    texts = [
        Text(pair.request(prompt, **one), seed, config or pair.decoder.config, outputs=Outputs(keep_logprobs=logprobs))
        for prompt, one in zip(prompts, given, strict=True)
    ]
    batch = Batch(pair.decoder, slots_for(texts), min(TEXTS, rows))
    for text in texts:
        batch.add(text)
    while batch.busy:
        for text, _ in batch.step():
            if text.failure is not None:
                raise text.failure
    return [pair.output(text.going) for text in texts]


def slots_for(texts: list[Text]) -> int:
    """As many as those need that are continued at a time."""
    needs = sorted((text.request.max_length + text.config.nodes + 2 * PAGE for text in texts), reverse=True)
    return sum(needs[:TEXTS])
