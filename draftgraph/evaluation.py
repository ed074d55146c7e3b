"""Quality with lm-evaluation-harness: its model for `transformers`, with answers that this decoder writes.

Importing this registers the model as `draftgraph`; `draftgraph eval` does that and hands over to the harness.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftgraph.config import GraphConfig
from draftgraph.decoder import fresh_seed
from draftgraph.errors import UsageError
from draftgraph.extras import install_command
from draftgraph.pair import load
from draftgraph.stats import Stats

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils_hf import stop_sequences_criteria
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise UsageError(f"an evaluation needs lm-eval: {install_command('eval')}") from error

OF_LOADING = frozenset(("target", "draft", "device", "dtype", "revision", "trust_remote_code"))
OF_GRAPH = frozenset(field.name for field in fields(GraphConfig))
OF_HARNESS = frozenset(
    (
        "add_bos_token",
        "batch_size",
        "chat_template_args",
        "enable_thinking",
        "logits_cache",
        "max_batch_size",
        "max_length",
        "prefix_token_id",
        "softmax_dtype",
        "think_end_token",
        "truncation",
    )
)


@register_model("draftgraph")
class DraftGraphLM(HFLM):  # type: ignore[misc]
    """Log-likelihoods are the target's alone; answers come through the graph, one text at a time.

    Takes the arguments of `draftgraph.load` and `GraphConfig`, and those of the harness's own model that are not about
    loading. Sampled text depends on the harness's `--seed` and a request's place, not on the mode.

    >>> lm = DraftGraphLM(target="YOUR/MODEL", draft="YOUR/DRAFT", mode="auto")    # doctest: +SKIP
    >>> lm_eval.simple_evaluate(lm, tasks=["gsm8k"])                               # doctest: +SKIP
    """

    def __init__(self, **arguments: Any) -> None:
        if unknown := sorted(arguments.keys() - OF_LOADING - OF_GRAPH - OF_HARNESS):
            known = ", ".join(sorted(OF_LOADING | OF_GRAPH | OF_HARNESS))
            raise UsageError(f"{unknown[0]} is no argument of the model draftgraph: it takes {known}")
        config = GraphConfig(**picked(arguments, OF_GRAPH))
        self.seeds = count(fresh_seed())  # before anything else asks torch for numbers
        pair = load(**picked(arguments, OF_LOADING))
        if pair.tokenizer is None:
            raise UsageError("an evaluation needs a tokenizer, and this target has none: save one into its folder")
        super().__init__(pair.target, tokenizer=pair.tokenizer, **picked(arguments, OF_HARNESS))
        pair.config = config
        self.decoder = pair.decoder
        self.stats = Stats()

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> DraftGraphLM:
        """`--model_args` win over the harness's options, whose device is CUDA whether there is one or not."""
        options = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if not torch.cuda.is_available() and str(options.get("device")).startswith("cuda"):
            del options["device"]
        return cls(**options | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> DraftGraphLM:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], attention_mask: Tensor, **wanted: Any
    ) -> Tensor:
        """Continues a left-padded batch; the harness cuts the texts before their stop strings."""
        if not wanted.get("do_sample"):
            wanted.pop("temperature", None)
        answers = []
        for ids, seen in zip(context, attention_mask.bool(), strict=True):
            prompt = ids[seen][None]
            out = self.decoder.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # a chat may have the padding's token inside
                max_new_tokens=max_length - context.shape[1],
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, prompt.shape[1], 1),
                pad_token_id=self.tokenizer.pad_token_id,
                seed=next(self.seeds),
                **wanted,
            )
            self.stats += out.stats
            answers.append(torch.tensor(out.new_token_ids[0], device=context.device))
        padded = pad_sequence(answers, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        return torch.cat([context, padded], dim=1)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        graph = {"draftgraph_mode": self.decoder.config.mode, "tokens_per_pass": self.stats.mean_accepted_length}
        return dict(super().get_model_info()) | graph


def picked(arguments: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in names}
