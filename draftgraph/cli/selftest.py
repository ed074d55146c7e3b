"""What `draftgraph doctor` tries out: the promise in small, and a model's own check."""

from __future__ import annotations

import copy
from typing import Any, get_args

from draftgraph.cli.options import Settings
from draftgraph.config import GraphConfig, Mode
from draftgraph.errors import DraftGraphError

VOCABULARY = 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def every_mode_equals_off() -> str:
    """A tiny random model and a draft that often agrees with it, greedy and sampled."""
    from draftgraph.decoder import GraphDecoder

    target, draft, prompt = tiny_pair()
    decoder = GraphDecoder(target, draft)
    samplings: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 0}]
    for sampling in samplings:

        def tokens(mode: Mode, sampling: dict[str, Any] = sampling) -> list[list[int]]:
            return decoder.generate(prompt, config=GraphConfig(mode=mode), max_new_tokens=32, **sampling).new_token_ids

        plain = tokens("off")
        for mode in get_args(Mode):
            if tokens(mode) != plain:
                raise DraftGraphError(f"mode {mode} gives other tokens than off ({sampling}): please report this")
    return f"{', '.join(get_args(Mode))}: the same tokens, greedy and sampled"


def tiny_pair() -> tuple[Any, Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        target = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
        for weight in target.parameters():
            weight.mul_(5.0 if weight.dim() > 1 else 1.0)  # some tokens likely, some not
        draft = copy.deepcopy(target)
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        return target, draft, torch.randint(0, VOCABULARY, (1, 8))


def model_check(settings: Settings) -> str:
    """The check that a model passes before it is trusted with a graph."""
    from draftgraph.engine.selfcheck import checked_engine
    from draftgraph.pair import load

    pair = load(**settings.model_arguments())
    said = []
    for role, model in (("target", pair.target), ("draft", pair.draft)):
        if model is not None:
            able = "token trees" if checked_engine(model).branching else "chains only"
            said.append(f"{role} {type(model).__name__}, {model.dtype} on {model.device}: {able}")
    return "; ".join(said).replace("torch.", "")
