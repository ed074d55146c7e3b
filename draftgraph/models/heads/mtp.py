"""MTP: layers for multi-token prediction, trained with their target and stored in its checkpoint.

Such a layer is a decoder layer of the target's own kind behind a projection of a token's embedding and the state before
it. So it is built as a model of the target's class with one layer, and transformers reads its tensors as it reads those
of the target, whatever the family calls them or merges.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.states import decoder_layers
from draftgraph.errors import LoadError, UsageError, one_line
from draftgraph.models.draft import lend_output_rows, lent_embedding, name_of, student_config, text_config
from draftgraph.models.faults import quiet_transformers
from draftgraph.models.fetch import find_in_cache
from draftgraph.models.heads.files import read_tensors, tensor_files
from draftgraph.models.heads.head import Head, fill, refuse_misfits
from draftgraph.models.packed_model import is_packed_folder
from draftgraph.notices import notice

DECODER, LAYER, NORM = "decoder.", "decoder.layers.0.", "decoder.norm."


class MtpHead(Head):
    """A layer for multi-token prediction, applied at every level: it reads the target's last state, behind the last
    norm, and then its own."""

    kind = "states"

    def __init__(self, decoder: Any) -> None:
        """`decoder`: a model of the target's class with one layer, whose last norm is that of the layer's output."""
        config = copy.copy(decoder.config)  # transformers refuses a choice of how experts run where a class has none
        private.set_implementation(config, "_experts_implementation", None)
        super().__init__(config)
        self.width = hidden = decoder.config.hidden_size
        self.decoder = decoder
        self.token_norm, self.state_norm = copy.deepcopy(decoder.norm), copy.deepcopy(decoder.norm)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False, dtype=decoder.dtype)
        self.lm_head = nn.Linear(hidden, decoder.config.vocab_size, bias=False, device="meta")
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.get_input_embeddings()  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.set_input_embeddings(value)

    def project(self, states: Tensor) -> Tensor:
        return states

    def compute(
        self,
        embeds: Tensor,
        states: Tensor,
        positions: Tensor | None,
        cache: Any,
        mask: Any,
        use_cache: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        joined = self.fc(torch.cat([self.token_norm(embeds), self.state_norm(states)], dim=-1))
        kwargs |= {"position_ids": positions, "past_key_values": cache, "attention_mask": mask}
        out = self.decoder(inputs_embeds=joined, use_cache=use_cache, return_dict=True, **kwargs)
        found = out.last_hidden_state
        return found, found, out.past_key_values


@dataclass(frozen=True)
class Layout:
    """How checkpoints of some families name the tensors of their MTP layers."""

    first: str  # pattern of how names of the first layer begin
    more: str  # the same of layers behind it
    places: Mapping[str, str | None]  # how names go on, and ours: the first that fits counts; None: not read

    def ours(self, name: str) -> str | None:
        """Our name of a tensor of the first layer; None if it is of no use."""
        begin = re.match(self.first, name)
        if begin is None or re.match(self.more, name) or name.endswith("rotary_emb.inv_freq"):
            return None
        rest = name[begin.end() :]
        for place, own in self.places.items():
            if rest.startswith(place):
                return None if own is None else own + rest.removeprefix(place)
        return rest

    def read(self, files: dict[str, Path]) -> dict[str, Tensor]:
        """The tensors of the first layer, of files by all tensors that there are, under our names."""
        named = {name: own for name in files if (own := self.ours(name)) is not None}
        return {named[name]: value for name, value in read_tensors({name: files[name] for name in named}).items()}

    def theirs(self, name: str) -> str:
        """What a checkpoint calls a tensor of ours, behind `first`."""
        for place, own in self.places.items():
            if own is not None and name.startswith(own):
                return place + name.removeprefix(own)
        return name


def layouts_behind(layers: int) -> list[Layout]:
    """Of checkpoints whose targets have so many layers."""
    behind_the_last = {  # DeepSeek, GLM, Hunyuan
        "enorm.": "token_norm.",
        "hnorm.": "state_norm.",
        "eh_proj.": "fc.",
        "shared_head.norm.": NORM,
        "shared_head.head.": None,  # the target's own once more
        "embed_tokens.": None,
        "": LAYER,
    }
    apart = {  # Qwen, Mellum, EXAONE
        "pre_fc_norm_embedding.": "token_norm.",
        "pre_fc_norm_hidden.": "state_norm.",
        "fc.": "fc.",
        "norm.": NORM,
        "layers.0.": LAYER,
    }
    return [
        Layout(rf"(.*\.)?layers\.{layers}\.", rf"(.*\.)?layers\.{layers + 1}\.", behind_the_last),
        Layout(r"mtp\.", r"mtp\.layers\.[1-9]", apart),
    ]


OF_SPECULATORS = Layout(  # in a folder of its own
    r"(mtp_layers\.0\.)?",
    r"mtp_layers\.[1-9]",
    {
        "token_layernorm.": "token_norm.",
        "hidden_layernorm.": "state_norm.",
        "input_proj.": "fc.",
        "final_layernorm.": NORM,
        "embed_tokens.": None,
        "lm_head.": None,
        "verifier_lm_head.": None,
        "": LAYER,
    },
)


def layer_config(config: Any, names: Iterable[str]) -> Any:
    """The configuration of a model of the target's class whose one layer is an MTP layer with these tensors.

    What it says of layers by their number does not hold of MTP layers, which families count in different ways.
    """
    of = text_config(config)
    alone = text_config(student_config(config, [of.num_hidden_layers - 1]))
    kinds, sparse = getattr(of, "layer_types", None) or [], any(".experts." in name for name in names)
    told = getattr(of, "mtp_layer_types", None) or [kind for kind in kinds if kind == "full_attention"] or kinds[-1:]
    said = {
        "layer_types": list(told[:1]),
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "mlp_only_layers": [] if sparse else [0],
        "first_k_dense_replace": 0 if sparse else 1,
        "decoder_sparse_step": 1,
    }
    for name, value in said.items():
        if getattr(alone, name, None) is not None:
            setattr(alone, name, value)
    return alone


@torch.no_grad()
def filled_mtp(kind: Any, config: Any, tensors: dict[str, Tensor], layout: Layout, target: Any, where: str) -> Any:
    """A head of these tensors, under our names, around a model of this class and the target's embedding and output
    matrix. `where`: what holds them, for messages."""
    from transformers.initialization import no_init_weights

    alone = layer_config(config, tensors)
    alone.vocab_size, alone.pad_token_id = 1, 0  # an embedding of its own would be thrown away
    inside = {name.removeprefix(DECODER): value for name, value in tensors.items() if name.startswith(DECODER)}
    inside["embed_tokens.weight"] = torch.zeros(1, alone.hidden_size)
    given = {"dtype": target.dtype, "attn_implementation": private.attention_of(text_config(target.config)) or "sdpa"}
    given |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # they are refused by name
    try:
        with quiet_transformers():
            decoder, info = kind.from_pretrained(None, config=alone, state_dict=inside, **given)
    except Exception as error:  # conversions of transformers fail in many ways
        raise LoadError(f"{where} cannot be read ({one_line(error)}): fetch it again") from error
    refuse_misfits(
        where,
        [layout.theirs(DECODER + name) for name in sorted(info["missing_keys"])],
        [layout.theirs(DECODER + name) for name in sorted(info["unexpected_keys"])],
        [layout.theirs(DECODER + name) for name, *_ in sorted(info["mismatched_keys"])],
    )
    of = text_config(target.config)
    decoder.config.vocab_size, decoder.config.pad_token_id = of.vocab_size, of.pad_token_id
    decoder.config.reads, decoder.config.name_or_path = [of.num_hidden_layers], ""
    with no_init_weights():
        head: Any = MtpHead(decoder)
    outside = {name: value for name, value in tensors.items() if not name.startswith(DECODER)}
    fill(where, head, outside, {"decoder", "lm_head"}, layout.theirs)
    head.set_input_embeddings(lent_embedding(target))
    lend_output_rows(head, target, None)
    return head.to(target.get_input_embeddings().weight.device).eval().requires_grad_(False)


def load_mtp(target: Any, revision: str | None = None, **options: Any) -> Any:
    """The MTP layer in a target's own checkpoint, as a head. `revision` and `options`: what the target was loaded with
    that says where its files are (`cache_dir`, `subfolder`)."""
    target = unwrapped(target)
    config, name = text_config(target.config), name_of(target)
    folder = checkpoint_of(target, revision, options)
    files = {} if is_packed_folder(folder) else tensor_files(folder)
    layout = next((one for one in layouts_behind(config.num_hidden_layers) if any(map(one.ours, files))), None)
    if layout is None:
        odd = next((name for name in files if "mtp" in name), None)
        what = f"MTP layers under names that are not supported ({odd})" if odd else "no MTP layers in its checkpoint"
        raise UsageError(f"{name} has {what}: give another draft, or none")
    if any(re.match(layout.more, one) for one in files):
        notice(f"{name} has several MTP layers: the first of them drafts at every level")
    _, decoder = decoder_layers(target)
    where, tensors = f"the MTP layer of {name}", layout.read(files)
    head = filled_mtp(type(decoder), as_stored(config, folder), tensors, layout, target, where)
    head.config.name_or_path = str(folder)
    return head


def as_stored(config: Any, folder: Path) -> Any:
    """A target's configuration with the quantisation of its checkpoint, whatever it became in memory. Blocks in eight
    bits, DeepSeek's own format, are multiplied out; tensors of other kinds are refused by their names."""
    stored = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    if stored.get("quant_method") == "fp8":
        plain.quantization_config = stored | {"dequantize": True}
    return plain


def checkpoint_of(target: Any, revision: str | None, options: dict[str, Any]) -> Path:
    """The folder that a target was loaded from, in the hub's cache or elsewhere."""
    name = str(getattr(target.config, "name_or_path", "") or "")
    folder: Path | None = Path(name).expanduser() if name else None
    if folder is not None and not folder.is_dir():
        try:
            folder = find_in_cache(name, "config.json", revision, options)
        except ValueError:  # no name that the hub could have
            folder = None
    if folder is None:
        what = f"{name} is not on this machine" if name else "the target was not loaded from a folder or the hub"
        raise UsageError(f"{what}, so its checkpoint cannot be searched for MTP layers: give the target by its name")
    return folder / (options.get("subfolder") or "")
