"""The way in through `transformers`: `target.generate(..., custom_generate=draftgraph.custom_generate)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder, fresh_seed
from draftgraph.generation import capture, refuse_fields
from draftgraph.output import gathered


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    draft_model: Any = None,
    graph_config: GraphConfig | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """For `target.generate(**inputs, custom_generate=draftgraph.custom_generate, draft_model=draft)`.

    `generate` passes callables neither a streamer nor a tokenizer: use GraphDecoder for those.
    """
    refuse_fields(model, {"generation_config": generation_config})
    request = capture(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    decoder = GraphDecoder(model, draft_model, config=graph_config or GraphConfig())
    seed = fresh_seed() if seed is None else seed
    decodings = []
    for row in range(len(input_ids)):
        decoding = decoder.start(request, row, seed)
        for _ in decoding:
            pass
        decodings.append(decoding)
    result = gathered(decodings, input_ids)
    if not generation_config.return_dict_in_generate:
        return result.sequences
    return GenerateDecoderOnlyOutput(sequences=result.sequences, scores=result.scores, logits=result.logits)  # type: ignore[arg-type]
