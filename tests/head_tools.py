"""Reference heads of `speculators` and transformers, with random or briefly trained weights, and their logits."""

import importlib.util
import json
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCABULARY, HIDDEN, LAYERS, DRAFT_VOCABULARY, BLOCK, MASK = 120, 32, 6, 40, 5, 119
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "max_position_embeddings": 256}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def reference():
    """The package `speculators`, without what it needs only to fetch data and to write a log."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed: pip install --no-deps speculators==0.9.0")
    absent = {"hs_connectors": ("FileTransfer", "HiddenStatesTransfer", "HiddenStatesBackend"), "loguru": ("logger",)}
    for module, names in absent.items():
        if module not in sys.modules and importlib.util.find_spec(module) is None:
            sys.modules[module] = types.ModuleType(module)
            for name in names:
                setattr(sys.modules[module], name, MagicMock())
    import speculators

    return speculators


def tiny_target(family="llama", folder=None, seed=0, **changed):
    torch.manual_seed(seed)
    config, model = FAMILIES[family]
    target = model(config(**SHAPE | {"num_hidden_layers": LAYERS} | changed)).eval()
    if folder is not None:
        target.save_pretrained(folder)
        target.config.name_or_path = str(folder)
    return target


def prompts(count=20):
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY - 1, (1, 6 + index), generator=draw) for index in range(count)]


@torch.no_grad()
def states_of(target, tokens, reads):
    hidden = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([hidden[index] for index in reads], dim=-1)


def token_map():
    draw = torch.Generator().manual_seed(3)
    return torch.randperm(VOCABULARY, generator=draw)[:DRAFT_VOCABULARY].sort().values


def made_for(target, speculators, algorithm, steps):
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return speculators.SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(
            name_or_path=target.config.name_or_path or None, architectures=[type(target).__name__]
        ),
    )


def layers_config(family, layers):
    config = FAMILIES[family][0](**SHAPE, num_hidden_layers=layers)
    config._attn_implementation = "eager"
    return config


def reference_states_head(target, family="llama", layers=1, columns=DRAFT_VOCABULARY, reads=(2, 3, 4), **choices):
    """An EAGLE-3 head of speculators with random weights, norms included."""
    speculators = reference()
    config = speculators.Eagle3SpeculatorConfig(
        transformer_layer_config=layers_config(family, layers),
        draft_vocab_size=columns,
        eagle_aux_hidden_state_layer_ids=None if reads is None else list(reads),
        speculators_config=made_for(target, speculators, "eagle3", 3),
        **choices,
    )
    torch.manual_seed(1)
    head = speculators.Eagle3DraftModel(config)
    fill_vocabulary(head, target)
    return randomised(head)


def reference_block_head(target, family="qwen3", layers=2, columns=VOCABULARY, reads=(2, 4, 5)):
    """A DFlash head of speculators with random weights."""
    speculators = reference()
    config = speculators.DFlashSpeculatorConfig(
        transformer_layer_config=layers_config(family, layers),
        draft_vocab_size=columns,
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=list(reads),
        speculators_config=made_for(target, speculators, "dflash", BLOCK - 1),
    )
    torch.manual_seed(1)
    head = speculators.DFlashDraftModel(config)
    fill_vocabulary(head, target)
    return randomised(head)


def reference_mtp_head(target):
    """An MTP head of speculators with random weights, for two levels."""
    speculators = reference()
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    made = made_for(target, speculators, "mtp", 2)
    torch.manual_seed(1)
    head = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=target.config, speculators_config=made))
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight.data)
    head.lm_head.weight.data.copy_(target.lm_head.weight.data)
    del head.verifier_lm_head
    return randomised(head)


def fill_vocabulary(head, target):
    rows = target.lm_head.weight.data
    if head.use_draft_vocab:
        rows, kept = rows[token_map()], token_map()
        head.d2t.copy_(kept - torch.arange(len(kept)))
        head.t2d[kept] = True
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight.data)
    head.lm_head.weight.data.copy_(rows)
    head.verifier_lm_head.weight.data.copy_(rows)
    head.verifier_norm.weight.data.copy_(target.model.norm.weight.data)


def randomised(head):
    """Norms that are all ones would hide one that is left out or stands in the wrong place."""
    draw = torch.Generator().manual_seed(2)
    for name, weight in head.named_parameters():
        if name.split(".")[0] in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
            continue
        noise = torch.randn(weight.shape, generator=draw) * 0.3
        weight.data = 1 + noise if weight.dim() == 1 else noise
    return head.eval()


def trained(head, loss_of, steps=4):
    """The same head after a few steps of an optimiser, which leave no weight as it was."""
    own = [weight for weight in head.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in own]
    optimiser = torch.optim.AdamW(own, lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of(head).backward()
        optimiser.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, own, strict=True))
    return head.eval()


def reference_states_logits(head, tokens, states, levels=1):
    """Logits of speculators' own forward, level by level: what its output matrix was asked for."""
    seen, hook = [], head.lm_head.register_forward_hook(lambda _m, _i, logits: seen.append(logits))
    documents = torch.zeros_like(tokens)
    with torch.no_grad():
        head(states, tokens, documents, ttt_steps=levels)
    hook.remove()
    return seen


def reference_block_logits(head, tokens, states):
    """Logits of a block that begins with the last of these tokens, behind the states of those before it.

    speculators anchors blocks inside of texts, so the text is padded; a block sees nothing behind its anchor."""
    known, room = tokens.shape[1] - 1, 2 * BLOCK
    padded = torch.nn.functional.pad(tokens, (0, room))
    states = torch.nn.functional.pad(states[:, :known], (0, 0, 0, 1 + room))
    anchor = torch.zeros_like(padded)
    anchor[0, known] = 1
    with torch.no_grad():
        found = head._backbone_forward(
            states, padded, anchor, states[..., :HIDDEN], torch.zeros_like(padded), max_anchors=1
        )
    return found[1]


def saved(head, folder):
    head.save_pretrained(folder)
    return folder


def rewritten(folder, to, content=None, tensors=None):
    """A copy of a folder with a config.json and tensors changed by these functions."""
    to.mkdir(parents=True, exist_ok=True)
    given, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    (to / "config.json").write_text(json.dumps(content(given) if content else given))
    save_file(tensors(weights) if tensors else weights, to / "model.safetensors")
    return to


# Our side of the same computations


@torch.no_grad()
def states_logits(head, tokens, states):
    return head(tokens, states=head.project(states), use_cache=False).logits


@torch.no_grad()
def block_logits(head, tokens, states):
    """The text goes into the cache first, as engines do it, and then the block, which sees itself as the head says."""
    from transformers import DynamicCache

    known, cache = tokens.shape[1] - 1, DynamicCache(config=head.config)
    head(tokens[:, :known], states=head.project(states[:, :known]), past_key_values=cache)
    block = torch.cat([tokens[:, known:], torch.full((1, BLOCK - 1), MASK)], dim=-1)
    seen = torch.ones(BLOCK, known + BLOCK, dtype=torch.bool)
    if head.causal:
        seen[:, known:] = seen[:, known:].tril()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    return head(block, past_key_values=cache, attention_mask=mask).logits
