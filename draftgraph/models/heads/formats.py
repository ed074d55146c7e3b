"""Folders of trained heads: which format one has, the head in it around its target, and the format that we write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, Qwen3Config

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import DraftGraphError, LoadError, UsageError, one_line
from draftgraph.files import ANOTHER_OUT, replacing, writing
from draftgraph.models.draft import (
    WEIGHTS,
    ends_of,
    is_packed,
    is_plain,
    lend_output_rows,
    lent_embedding,
    name_of,
    own_weights,
    text_config,
)
from draftgraph.models.heads.block import BlockHead
from draftgraph.models.heads.files import read_tensors, tensor_files
from draftgraph.models.heads.head import Head, fill
from draftgraph.models.heads.mtp import OF_SPECULATORS, MtpHead, filled_mtp
from draftgraph.models.heads.states import CHOICES, LAYERS, StatesHead, default_reads
from draftgraph.notices import notice

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")  # written by trainers, not read here
PLACES = {"midlayer.": "layers.0.", "model.": ""}  # names of tensors, as others begin them
SPECULATORS = "0.9.0"  # whose format we write
UNSUPPORTED = {
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "eagle": "EAGLE of the first or second kind",
    "medusa": "Medusa",
    "peagle": "P-EAGLE",
    "xpress": "XPress",
}


@dataclass(frozen=True)
class HeadFormat:
    """What a folder's config.json says, in the words of our own modules."""

    kind: type[Head]
    layers: dict[str, Any]  # the configuration of the head's decoder layers
    reads: list[int] | None  # i of h[i]; none: the three that EAGLE-3 reads
    fields: dict[str, Any] = field(default_factory=dict)  # further fields of the module's configuration
    verifier: str | None = None  # the target's name
    target_layers: int | None = None  # how many layers it has
    reads_before_norm: bool = False  # whether h[L] would be meant before the target's last norm


def is_head_folder(folder: Any) -> bool:
    """Whether this is a folder of a trained head in a format that is known, be it supported or not."""
    try:
        content = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError, TypeError):
        return False
    return isinstance(content, dict) and family_of(content) is not None


def family_of(content: dict[str, Any]) -> str | None:
    """The family of the head with this config.json, by its fields alone; None if it is of no head."""
    if (kind := content.get("speculators_model_type")) is not None:
        return str(kind)
    names = " ".join(content.get("architectures") or []).lower()
    block = content.get("dflash_config")
    if "medusa_num_heads" in content or "medusa" in names:
        return "medusa"
    if "dspark" in names or "markov_rank" in content or "markov_rank" in (block or {}):
        return "dspark"
    if block is not None or "dflash" in names:
        return "zlab"
    if "eagle3" in names or "draft_vocab_size" in content or "eagle_config" in content:
        parallel = "peagle" in names or content.get("parallel_drafting") or "mask_token_id" in content
        return "peagle" if parallel else "eagle3 of Llama"
    return "eagle" if "eagle" in names else None


def load_head(folder: Any, target: Any) -> Any:
    """The head in a folder, beside its target, in the target's dtype and place.

    The formats are EAGLE-3 (of its authors, SpecForge and speculators), DFlash (z-lab and speculators), JetSpec and MTP
    (speculators; `load_mtp` loads that in a target's own checkpoint).
    """
    folder, target = Path(folder).expanduser(), unwrapped(target)
    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise LoadError(f"the head in {folder} cannot be read ({one_line(error)}): copy it again") from error
    family = family_of(content) if isinstance(content, dict) else None
    if family not in READERS:
        what, known = UNSUPPORTED.get(family or "", family), "an EAGLE-3, DFlash, JetSpec or MTP head"
        raise UsageError(
            f"{folder} holds a head of the kind {what}, which is not supported: give {known}"
            if what
            else f"{folder} holds no trained head: its config.json names none of the known formats"
        )
    try:
        head = made_head(folder, READERS[family], content, target)
    except DraftGraphError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        what = f"the configuration in {folder} makes no sense here ({type(error).__name__}: {one_line(error)})"
        raise LoadError(f"{what}: copy the head again, or give another") from error
    head.config.name_or_path = str(folder)
    return head


def made_head(folder: Path, read: Callable[[dict[str, Any]], HeadFormat], content: dict[str, Any], target: Any) -> Any:
    """Of a configuration that this function reads, and the tensors beside it."""
    try:
        found = read(content)
        config = head_config(found, target)
    except UsageError as error:
        raise UsageError(f"the head in {folder} cannot be used: {error}") from error
    refuse_another_target(folder, found, config, target)
    if found.kind is MtpHead:
        where, tensors = f"the head in {folder}", OF_SPECULATORS.read(tensor_files(folder))
        return filled_mtp(MODEL_MAPPING[type(config)], config, tensors, OF_SPECULATORS, target, where)
    return filled_head(folder, found.kind, config, tensors_in(folder), target)


def read_eagle(content: dict[str, Any]) -> HeadFormat:
    """The authors' format and SpecForge's: a Llama configuration. Layer numbers, if there are any, are layer outputs in
    SpecForge's section, as SGLang reads them, and states at the top level, where vLLM looks for them."""
    section = content.get("eagle_config") or {}
    if section.get("use_aux_hidden_state") is False:
        raise UsageError("it reads the last hidden state alone, as EAGLE of the first kind does: give an EAGLE-3 head")
    outputs = section.get("eagle_aux_hidden_state_layer_ids")
    return HeadFormat(
        StatesHead,
        {"model_type": "llama"} | content,
        [layer + 1 for layer in outputs] if outputs else content.get("eagle_aux_hidden_state_layer_ids"),
        # Neither cnets.py nor SpecForge's llama3_eagle.py has norm_before_residual: their residual is the state itself.
        {name: section.get(name, content.get(name, False)) for name in CHOICES}
        | {"draft_vocab_size": content.get("draft_vocab_size")}
        | {"target_hidden_size": content.get("target_hidden_size")},
        target_layers=content.get("num_target_layers"),
    )


def read_speculators_eagle(content: dict[str, Any]) -> HeadFormat:
    return HeadFormat(
        StatesHead,
        {"model_type": "qwen3"} | content["transformer_layer_config"],  # its default
        content.get("eagle_aux_hidden_state_layer_ids"),
        # All four are False in Eagle3SpeculatorConfig, which leaves none of them out when it is written.
        {name: content.get(name, False) for name in CHOICES} | {"draft_vocab_size": content["draft_vocab_size"]},
        verifier_of(content),
        reads_before_norm=True,
    )


def read_speculators_block(content: dict[str, Any]) -> HeadFormat:
    if content.get("sample_from_anchor"):
        raise UsageError("it predicts from the first place of a block (sample_from_anchor), which is not supported")
    layers = {"model_type": "qwen3"} | content["transformer_layer_config"]
    sliding = [kind == "sliding_attention" for kind in layers.get("layer_types") or [False]]
    causal = any(sliding) and not content.get("sliding_window_non_causal")
    if causal and not all(sliding):
        raise UsageError("some of its layers see a block both ways and some causally, which is not supported")
    fields = {name: content.get(name) for name in ("draft_vocab_size", "block_size", "mask_token_id")}
    reads = content.get("aux_hidden_state_layer_ids")
    return HeadFormat(BlockHead, layers, reads, fields | {"causal": causal}, verifier_of(content), None, True)


def read_zlab(content: dict[str, Any]) -> HeadFormat:
    """DFlash of its authors, and JetSpec, which has one field more."""
    section = content.get("dflash_config") or {}
    mask = section.get("mask_token_id")  # may be token 0
    fields = {"mask_token_id": content.get("mask_token_id") if mask is None else mask}
    fields |= {"block_size": content.get("block_size") or section.get("block_size")}
    fields |= {"causal": bool(section.get("causal_head")), "draft_vocab_size": content.get("draft_vocab_size")}
    layers = {"model_type": "qwen3"} | content
    reads = [layer + 1 for layer in section["target_layer_ids"]]
    return HeadFormat(BlockHead, layers, reads, fields, target_layers=content.get("num_target_layers"))


def read_speculators_mtp(content: dict[str, Any]) -> HeadFormat:
    layers = {"model_type": "qwen2"} | content["transformer_layer_config"]  # its default
    count = layers["num_hidden_layers"]
    return HeadFormat(MtpHead, layers, [count], {}, verifier_of(content), count)


READERS: dict[str, Callable[[dict[str, Any]], HeadFormat]] = {
    "eagle3 of Llama": read_eagle,
    "eagle3": read_speculators_eagle,
    "dflash": read_speculators_block,
    "mtp": read_speculators_mtp,
    "zlab": read_zlab,
}


def verifier_of(content: dict[str, Any]) -> str | None:
    name = ((content.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return None if name is None else str(name)


def head_config(found: HeadFormat, target: Any) -> Any:
    """The configuration of our module."""
    given = {name: value for name, value in found.layers.items() if name not in ("auto_map", "architectures", "dtype")}
    kind, count = given.pop("model_type"), text_config(target.config).num_hidden_layers
    if kind not in LAYERS and found.kind is not MtpHead:  # whose layer is of the target's class
        raise UsageError(f"its layers are of the kind {kind}, and only those of {' and '.join(LAYERS)} are supported")
    config = AutoConfig.for_model(kind, **given)
    if found.kind is BlockHead and kind != "qwen3":  # every block head has the layers of Qwen3, whoever lent the sizes
        lent = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        config = Qwen3Config(**lent)
    reads = found.reads or default_reads(count)
    for name, value in found.fields.items():
        setattr(config, name, value)
    config.reads, config.tie_word_embeddings = list(reads), False
    config.draft_vocab_size = getattr(config, "draft_vocab_size", None) or config.vocab_size
    config.target_hidden_size = getattr(config, "target_hidden_size", None) or config.hidden_size
    if found.kind is BlockHead and (config.block_size is None or config.mask_token_id is None):
        raise UsageError("its configuration names no block_size or no mask_token_id: ask who published it for both")
    return config


def refuse_another_target(folder: Path, found: HeadFormat, config: Any, target: Any) -> None:
    """Says what does not fit. A name alone is only noticed: folders get renamed."""
    of = text_config(target.config)
    wrong = []
    for what, wanted, here in (
        ("hidden size", config.target_hidden_size, of.hidden_size),
        ("a vocabulary of", config.vocab_size, of.vocab_size),
        ("layers:", found.target_layers or of.num_hidden_layers, of.num_hidden_layers),
    ):
        if wanted != here:
            wrong.append(f"{what} {wanted}, not {here}")
    if min(config.reads) < 0 or max(config.reads) > of.num_hidden_layers:
        wrong.append(f"states {config.reads} of {of.num_hidden_layers} layers")
    if wrong:
        made = f" was made for {found.verifier} and" if found.verifier else ""
        raise UsageError(
            f"the head in {folder}{made} does not fit {name_of(target)} (the head wants {'; '.join(wrong)}): "
            "give the target that it was made for"
        )
    if found.reads_before_norm and of.num_hidden_layers in config.reads:
        raise UsageError(
            f"the head in {folder} reads the target's last state before its last norm, which is not supported: "
            "give a head that reads earlier states"
        )
    given = str(getattr(target.config, "name_or_path", "") or "")
    if found.verifier and given and Path(found.verifier).name.lower() != Path(given).name.lower():
        notice(f"the head in {folder} was made for {found.verifier}; its sizes fit {given}, so it is used")


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, under the names of our modules."""
    return {our_name(name): value for name, value in read_tensors(tensor_files(folder)).items()}


def our_name(name: str) -> str:
    for place, ours in reversed(PLACES.items()):
        name = ours + name.removeprefix(place) if name.startswith(place) else name
    return name


def filled_head(folder: Path, kind: type[Head], config: Any, tensors: dict[str, Tensor], target: Any) -> Any:
    """A head with these weights; embedding and output matrix are the target's where the folder has none."""
    from transformers.initialization import no_init_weights

    token_map, embedding = token_map_of(folder, config, tensors), ends_of(target)[0]
    with no_init_weights():
        attention = private.attention_of(text_config(target.config)) or "sdpa"
        head = private.new_model(kind, config, target.dtype, attention)
    if EMBEDDING in tensors and is_copy(tensors[EMBEDDING], embedding):
        tensors.pop(EMBEDDING)  # most heads bring one: once in memory is enough
    fits = config.hidden_size == text_config(target.config).hidden_size
    lent = tuple(name for name in (EMBEDDING, OUTPUT) if fits and name not in tensors)
    if EMBEDDING in lent:
        head.set_input_embeddings(lent_embedding(target))
    if OUTPUT in lent:
        lend_output_rows(head, target, token_map)
    elif token_map is not None:
        head.register_buffer("token_map", token_map, persistent=False)
    fill(f"the head in {folder}", head, tensors, {name.partition(".")[0] for name in lent})
    return head.to(embedding.weight.device).eval().requires_grad_(False)


def is_copy(weight: Tensor, embedding: Any) -> bool:
    """Whether this is the matrix of a target's embedding, which does nothing but look it up."""
    original: Tensor = embedding.weight
    if type(embedding) is not nn.Embedding or not is_plain(original) or weight.shape != original.shape:
        return False
    return torch.equal(weight.to(original.dtype), original.detach().cpu())


def token_map_of(folder: Path, config: Any, tensors: dict[str, Tensor]) -> Tensor | None:
    """The target's token of each logits column, of the offsets in `d2t`; None if column i is token i."""
    for name in OF_THE_TARGET:
        tensors.pop(name, None)
    offsets, columns = tensors.pop("d2t", None), config.draft_vocab_size
    if columns == config.vocab_size:
        return None
    if offsets is None or len(offsets) != columns:
        raise UsageError(f"the head in {folder} writes {columns} tokens and does not say which: d2t is missing or cut")
    found = torch.arange(columns) + offsets.long()
    if int(found.min()) < 0 or int(found.max()) >= config.vocab_size:
        raise UsageError(f"d2t of the head in {folder} names tokens outside of the vocabulary: copy the head again")
    return found


def export_head(head: Any, target: Any, folder: Any) -> None:
    """Writes a head in the format of speculators, which vLLM and SGLang read; a JetSpec head in its own, since that
    format has no causal blocks."""
    from safetensors.torch import save_file

    folder, config, of = Path(folder).expanduser(), head.config, text_config(target.config)
    if config.hidden_size != of.hidden_size or head.get_output_embeddings().bias is not None:
        raise UsageError(
            "this head cannot be exported: the format wants the width of the target and an output matrix without bias"
        )
    reduced = getattr(head, "token_map", None) is not None
    if head.kind == "block" and head.causal:
        if reduced:
            raise UsageError("this head cannot be exported: the format of JetSpec has no reduced vocabulary")
        content = jetspec_config(config, of)
    elif of.num_hidden_layers in head.reads:
        raise UsageError(
            "this head cannot be exported: in the format the last state is that before the target's last norm"
        )
    else:
        content = speculators_config(head, target)
    tensors = {name: value.detach().cpu().contiguous() for name, value in own_weights(head).items()}
    if head.kind == "states":
        tensors[EMBEDDING] = numbers_of(head.get_input_embeddings().weight, head.dtype)
    if head.kind == "states" or reduced:
        tensors[OUTPUT] = numbers_of(head.get_output_embeddings().weight, head.dtype)
    if reduced:
        tokens = head.token_map.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(of.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    with writing("the exported head", folder, ANOTHER_OUT):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as file:
            save_file(tensors, file, metadata={"format": "pt"})
        with replacing(folder / "config.json") as file:
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def numbers_of(weight: Any, dtype: torch.dtype) -> Tensor:
    plain: Tensor = weight.detach().numbers() if is_packed(weight) else weight.detach()
    return plain.to("cpu", dtype, copy=True).contiguous()


def layers_config(config: Any) -> dict[str, Any]:
    """The configuration of the decoder layers alone."""
    added = ("reads", "causal", "block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", *CHOICES)
    unkept = (*added, "_name_or_path", "architectures", "dtype", "transformers_version")
    return {name: value for name, value in config.to_dict().items() if name not in unkept}


def speculators_config(head: Any, target: Any) -> dict[str, Any]:
    config, kind = head.config, "eagle3" if head.kind == "states" else "dflash"
    if kind == "eagle3":
        of_kind = {name: getattr(config, name) for name in CHOICES}
        of_kind |= {"eagle_aux_hidden_state_layer_ids": [*head.reads]}
    else:
        of_kind = {"aux_hidden_state_layer_ids": [*head.reads], "sample_from_anchor": False}
        of_kind |= {"block_size": head.block_size, "mask_token_id": head.mask_token_id}
        of_kind |= {"sliding_window_non_causal": True}  # every block that we write sees itself both ways
    steps = head.block_size - 1 if kind == "dflash" else 3
    name = str(getattr(target.config, "name_or_path", "") or "") or None
    verifier = {"name_or_path": name, "architectures": target.config.architectures or [type(target).__name__]}
    return of_kind | {
        "architectures": ["Eagle3DraftModel" if kind == "eagle3" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": verifier,
        },
        "transformer_layer_config": layers_config(config),
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": str(head.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }


def jetspec_config(config: Any, of: Any) -> dict[str, Any]:
    section = {"target_layer_ids": [index - 1 for index in config.reads], "mask_token_id": config.mask_token_id}
    return layers_config(config) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": section | {"causal_head": True},
        "num_target_layers": of.num_hidden_layers,
    }
