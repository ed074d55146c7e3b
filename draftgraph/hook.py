"""The way in through `transformers`: `target.generate(..., custom_generate=draftgraph.custom_generate)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder, fresh_seed, gathered, stream
from draftgraph.generation import capture, refuse_fields

KEPT = "_draftgraph_decoder"  # an attribute of the model, so that both are forgotten together


class Kept:
    """The decoder of the last call with a model: what it has recorded and learnt serves the next."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self.decoder = decoder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a model that is copied or saved has None: nothing that needs this package


def kept_decoder(model: Any, draft: Any) -> GraphDecoder:
    kept: Kept | None = vars(model).get(KEPT)
    if kept is None or kept.decoder.target_model is not model or kept.decoder.draft_model is not draft:
        kept = vars(model)[KEPT] = Kept(GraphDecoder(model, draft))
    return kept.decoder


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
    """Lets `generate` of `transformers` decode with a token graph; `generate` passes it the first five arguments.

    It passes neither a streamer nor a tokenizer: use `GraphDecoder` for those.

    Examples:
        >>> prompt = pair.tokenizer("The days of the week are Monday,", return_tensors="pt")
        >>> ours = {"custom_generate": draftgraph.custom_generate, "draft_model": pair.draft}
        >>> sequences = pair.target.generate(**prompt, **ours, max_new_tokens=8, do_sample=False)
    """
    refuse_fields(model, {"generation_config": generation_config})
    request = capture(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
    decoder = kept_decoder(model, draft_model)
    seed, config = fresh_seed() if seed is None else seed, graph_config or GraphConfig()
    decodings = []
    for row in range(len(input_ids)):
        decodings.append(decoder.start(request, row, seed, config=config))
        stream(decodings[-1])
    result = gathered(decodings, input_ids)
    if not generation_config.return_dict_in_generate:
        return result.sequences
    return GenerateDecoderOnlyOutput(sequences=result.sequences, scores=result.scores, logits=result.logits)  # type: ignore[arg-type]
