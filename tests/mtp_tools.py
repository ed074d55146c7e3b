"""Tiny targets whose checkpoints hold an MTP layer, in the layouts of many families, and references for its logits."""

import copy
import json
from dataclasses import dataclass, field

import torch
import transformers as tf
from head_tools import VOCABULARY, prompts
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

WINDOW = 8  # shorter than most prompts
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
SMALL |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
ROUTED = EXPERTS | {"n_group": 1, "topk_group": 1, "n_routed_experts": 4}
LATENT = ROUTED | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SHARED = {"shared_expert_intermediate_size": 16}
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
HYBRID = (RECURRENT, RECURRENT, RECURRENT, FULL)

BEHIND_THE_LAST = {"token_norm": "enorm", "state_norm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
APART = {"token_norm": "pre_fc_norm_embedding", "state_norm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"}


@dataclass(frozen=True)
class Family:
    config: str
    fields: dict = field(default_factory=dict)
    kinds: tuple | None = None  # of attention, by the target's layers; None: the family has one kind
    apart: bool = False  # whether its tensors begin with "mtp."
    mtp: dict = field(default_factory=dict)  # what its configuration says of MTP layers


FAMILIES = {
    "deepseek_v3": Family("DeepseekV3Config", LATENT | {"first_k_dense_replace": 1}),
    "glm4_moe": Family("Glm4MoeConfig", ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True}),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", LATENT),
    "hy_v3": Family("HYV3Config", EXPERTS),
    "mellum": Family(
        "MellumConfig",
        EXPERTS | {"sliding_window": WINDOW},
        (FULL, SLIDING, FULL),
        True,
        {"num_mtp_layers": 1, "mtp_layer_types": [SLIDING], "mtp_mlp_layer_types": ["sparse"]},
    ),
    "exaone_moe": Family(
        "ExaoneMoeConfig",
        ROUTED | {"num_shared_experts": 1, "sliding_window": WINDOW},
        (SLIDING, FULL, SLIDING),
        True,
        {"num_mtp_layers": 1, "mtp_layer_types": [SLIDING], "mtp_mlp_layer_types": ["dense"]},
    ),
    "qwen3": Family("Qwen3Config", {}, (FULL, FULL, FULL), True),
    "qwen3_next": Family("Qwen3NextConfig", EXPERTS | LINEAR | SHARED, HYBRID, True),
    "qwen3_5": Family("Qwen3_5TextConfig", LINEAR, HYBRID, True),
    "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", EXPERTS | LINEAR | SHARED, HYBRID, True),
}
if hasattr(tf, "BailingHybridConfig"):
    FAMILIES["bailing_hybrid"] = Family("BailingHybridConfig", LATENT | {"first_k_dense_replace": 1}, (*HYBRID, FULL))
RECURRENT_FAMILIES = [name for name, family in FAMILIES.items() if RECURRENT in (family.kinds or ())]
PLAIN_FAMILIES = [name for name in FAMILIES if name not in RECURRENT_FAMILIES]


class Checkpoint:
    """A target and an MTP layer: the target's class with one layer more, whose last one is the MTP layer's."""

    def __init__(self, name, seed=0):
        self.name, self.family = name, FAMILIES[name]
        self.layers = len(self.family.kinds or range(3))
        self.kind = self.family.mtp.get("mtp_layer_types", [FULL])[0]
        torch.manual_seed(seed)
        self.whole = tf.AutoModelForCausalLM.from_config(self.config(self.layers + 1), attn_implementation="eager")
        hidden, norm = SMALL["hidden_size"], self.whole.get_decoder().norm
        self.parts = nn.ModuleDict({part: copy.deepcopy(norm) for part in ("token_norm", "state_norm", "norm")})
        self.parts["fc"] = nn.Linear(2 * hidden, hidden, bias=False)
        for part in (self.whole, self.parts):  # norms that are all ones would hide one in the wrong place
            for weight in part.parameters():
                weight.data += torch.randn(weight.shape) * 0.3 if weight.dim() == 1 else 0.0
        self.whole.eval()

    def config(self, layers):
        kinds, mlp = self.family.kinds, self.family.mtp.get("mtp_mlp_layer_types")
        more = (
            {} if kinds is None else {"layer_types": [*kinds, *self.family.mtp.get("mtp_layer_types", [FULL])][:layers]}
        )
        if mlp is not None:
            more["mlp_layer_types"] = ["sparse"] * min(layers, self.layers) + mlp * (layers - self.layers)
        return getattr(tf, self.family.config)(**SMALL | self.family.fields | more, num_hidden_layers=layers)

    def states(self, target, tokens):
        with torch.no_grad():
            return target(tokens, output_hidden_states=True).hidden_states[-1]

    def logits(self, tokens, states):
        """Of the family's own decoder layer, of tokens behind those whose states these are."""
        base, parts = self.whole.get_decoder(), self.parts
        given = [parts["token_norm"](base.get_input_embeddings()(tokens)), parts["state_norm"](states)]
        hidden, positions = parts["fc"](torch.cat(given, dim=-1)), torch.arange(tokens.shape[1])[None] + 1
        by_kind = {"layer_type": self.kind} if self.name == "mellum" else {}
        behind = positions[0][:, None] - positions[0]
        seen = (behind >= 0) & (behind < (WINDOW if self.kind == SLIDING else len(behind)))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        places = positions.expand(3, 1, -1) if "qwen3_5" in self.name else positions  # time, height, width: of pictures
        rotary = base.rotary_emb(hidden, places, **by_kind)
        out = base.layers[-1](hidden, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
        return self.whole.lm_head(parts["norm"](out[0] if isinstance(out, tuple) else out))

    def train(self, target, steps=24):
        """A few dozen steps towards what the target says."""
        own = [*self.whole.get_decoder().layers[-1].parameters(), *self.parts.parameters()]
        optimiser, tokens = torch.optim.AdamW(own, lr=1e-2), prompts()[-3:]
        wanted = [target(one).logits[0, 1:].argmax(-1).detach() for one in tokens]
        states = [self.states(target, one)[:, :-1] for one in tokens]
        losses = []
        for _ in range(steps):
            optimiser.zero_grad()
            given = zip(tokens, states, wanted, strict=True)
            loss = sum(cross_entropy(self.logits(one[:, 1:], state)[0], best) for one, state, best in given)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], losses

    def save(self, folder):
        """In the family's own layout, experts apart, as it is published."""
        self.whole.save_pretrained(folder)
        self.config(self.layers).save_pretrained(folder)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(content | self.family.mtp | {"architectures": [type(self.whole).__name__]})
        )
        tensors, last = load_file(folder / "model.safetensors"), f"model.layers.{self.layers}."
        places, begin = (APART, "mtp.") if self.family.apart else (BEHIND_THE_LAST, last)
        inside = "mtp.layers.0." if self.family.apart else last
        named = {name.replace(last, inside): weight for name, weight in tensors.items()}
        named |= {f"{begin}{places[name]}.weight": part.weight.data for name, part in self.parts.items()}
        if not self.family.apart:
            named[f"{last}shared_head.head.weight"] = self.whole.lm_head.weight.data.clone()
            named[f"{last}embed_tokens.weight"] = self.whole.get_input_embeddings().weight.data.clone()
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def load(self, folder):
        return tf.AutoModelForCausalLM.from_pretrained(folder).eval()


def is_read_by_transformers(name):
    """Whether the installed release's own module reads the layout of this family: of "mtp." since it has Mellum's."""
    return not FAMILIES[name].apart or hasattr(tf.MellumConfig(), "mtp_layer_types")


def module_of_transformers(target, name):
    """`MtpModel`, told what published configurations and classes say of published sizes."""
    from transformers.modeling_layers import MtpModel

    target = copy.deepcopy(target)
    told = {"num_mtp_layers": 1, "mtp_layer_types": [FULL], "mtp_mlp_layer_types": ["sparse"]} | FAMILIES[name].mtp
    for field_name, value in told.items():
        setattr(target.config, field_name, value)
    target._keys_to_ignore_on_load_unexpected = [rf"layers\.{target.config.num_hidden_layers}\.", r"^mtp\."]
    return MtpModel.from_pretrained(target).eval()


@torch.no_grad()
def logits_of_transformers(module, tokens, states):
    """Of all tokens: the module itself returns those of the last one."""
    from transformers.cache_utils import MtpCache

    seen, count = [], tokens.shape[1]
    hook = module.layers[0].register_forward_hook(lambda _m, _i, out: seen.append(out))
    positions = torch.arange(count)[None] + 1
    _, last, _ = module(tokens, states, torch.ones_like(tokens), positions, MtpCache(config=module.config))
    hook.remove()
    logits = module.shared_head(seen[0])
    torch.testing.assert_close(logits[:, -1:], last[:, :1])
    return logits
