"""`pair.generate` with a list of prompts: all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftgraph.batching.batch import TEXTS, Batch
from draftgraph.batching.text import Text
from draftgraph.choose import Outputs
from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder, fresh_seed
from draftgraph.engine.borrowing import fingerprint, unwrapped
from draftgraph.engine.packed_static import PackedStaticEngine
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
    texts = [
        Text(pair.request(prompt, **one), seed, config or pair.decoder.config, outputs=Outputs(keep_logprobs=logprobs))
        for prompt, one in zip(prompts, given, strict=True)
    ]
    with batch_for(pair.decoder, texts) as batch:
        if batch is None:
            alone = {"seed": seed, "config": config, "logprobs": logprobs}
            return [pair.generate(prompt, **alone, **one) for prompt, one in zip(prompts, given, strict=True)]
        for text in texts:
            batch.add(text)
        while batch.busy:
            for text, _ in batch.step():
                if text.failure is not None:
                    raise text.failure
    return [pair.output(text.going) for text in texts]


@contextmanager
def batch_for(decoder: GraphDecoder, texts: list[Text]) -> Iterator[Batch | None]:
    """None: where recorded passes serve one text at a time alone, or there is only one. Passes that were recorded for
    many are kept for the next texts, if those need no more room and the weights are the same."""
    slots, captured = slots_for(texts), isinstance(decoder.target_engine, StaticEngine)
    if captured and len(texts) == 1:
        yield None
        return
    kept, state = decoder.kept_batch, [fingerprint(model) for model in decoder.models]
    decoder.kept_batch = None  # what was interrupted is not used again
    if kept is None or kept[0] != state or any(engine.slots < slots for engine in kept[1].engines):
        kept = None  # its slots are free for the next
        kept = state, Batch(decoder, slots)
    is_static = isinstance(kept[1].target, PackedStaticEngine)
    yield kept[1] if is_static or not captured else None
    decoder.kept_batch = kept if is_static else None


def slots_for(texts: list[Text]) -> int:
    """As many as those need that are continued at a time."""
    needs = sorted((text.request.max_length + text.config.nodes + 2 * PAGE for text in texts), reverse=True)
    return sum(needs[:TEXTS])
