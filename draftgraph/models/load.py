"""From a name, a folder, a GGUF file or a module to a model that is ready to decode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftgraph.errors import LoadError, UsageError
from draftgraph.models.faults import explain, quiet_transformers
from draftgraph.models.fetch import cached_copy, default_model, gguf_from_hub
from draftgraph.models.gguf_file import converted_folder, is_gguf, refuse_missing_weights
from draftgraph.notices import notice

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from draftgraph.engine.ranks import Ranks

SHARED_WITH_TOKENIZER = ("cache_dir", "force_download", "proxies", "revision", "subfolder", "token")
SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
POSSIBLE = "float32, bfloat16, float16, float64 or auto"
TOKEN_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
QUANTIZED = {"int8": 8, "int4": 4}  # bits of a weight
FEW = 64  # added tokens by which tokenizers of one family differ at the end


def load_model(
    spec: str | os.PathLike[str] | torch.nn.Module | None,
    *,
    role: Literal["target", "draft"] = "target",
    device: str | int | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    device_map: Any = None,
    quantize: str | None = None,
    tensor_parallel: int | None = None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model and its tokenizer, if it has one.

    `spec` is a hub name, a folder, a GGUF file, a module (returned as it is, neither moved nor cast) or, for the
    target, None: the embedded default. On a CPU weights keep the format of their file unless a dtype is given: 4 or 8
    bits, or bfloat16 where rows keep their bits in it; `quantize` ("int8" or "int4") makes them smaller.
    `tensor_parallel`: so many processes, each with a part of the weights. Further arguments go to transformers'
    `from_pretrained`.
    """
    import torch

    from draftgraph.models.packed_model import compress, is_packed_folder
    from draftgraph.models.ranks import adopt_split, ranks_asked, ranks_for

    if isinstance(spec, torch.nn.Module):
        adopt_split(spec)
        return spec, tokenizer_of_module(spec)  # type: ignore[return-value]
    if device is not None and device_map is not None:
        raise UsageError("device and device_map exclude each other: give one of them")
    place = choose_device(device)
    ranks = ranks_asked(tensor_parallel, model_kwargs)
    if ranks > 1 and (quantize is not None or device_map is not None or place.index is not None):
        raise UsageError("a model that is split over ranks takes no quantize, device_map or device with a number")
    options: dict[str, Any] = {"use_safetensors": True} | model_kwargs
    whole = ranks == 1 and device_map is None
    as_filed = place.type == "cpu" and dtype is None and quantization_config is None and whole
    options |= {"dtype": "auto" if as_filed else choose_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    if device_map is not None or (place.type != "cpu" and ranks == 1):
        options["device_map"] = device_map if device_map is not None else {"": place}
    if quantization_config is not None:
        options["quantization_config"] = quantization_config

    if quantize is not None and (quantize not in QUANTIZED or place.type != "cpu"):
        raise UsageError(f"quantize must be {' or '.join(QUANTIZED)}, on a CPU, not {quantize!r} on {place}")
    source = find_source(spec, role, revision, options, as_filed and quantize is None)
    if not Path(source).is_dir() and revision is not None:
        options["revision"] = revision
    model = read_model(source, options) if ranks == 1 else load_split(ranks_for(ranks, place), source, options)
    if quantize is not None:
        lost = compress(model, QUANTIZED[quantize])
        notice(f"{role} in {quantize}: its weights are off by {lost:.1%} of their size (root mean square)")
    elif as_filed and not is_packed_folder(Path(source)) and not keeps_its_bits(model):
        model = model.float()
    shared = {key: options[key] for key in SHARED_WITH_TOKENIZER if key in options}
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, **shared)
    if tokenizer is None:
        tokenizer = tokenizer_of_module(model)  # an adapter's is that of its base
    return model, tokenizer


def load_split(ranks: Ranks, source: str, options: dict[str, Any]) -> PreTrainedModel:
    """Every rank loads its part: each in a script that torchrun started, else followers are told to."""
    from draftgraph.engine.messages import packed

    if not ranks.scripted:
        told = {name: str(one).removeprefix("torch.") if name == "dtype" else one for name, one in options.items()}
        try:
            packed(told)
        except TypeError as error:
            raise UsageError(f"{error}: start the script with torchrun in place of tensor_parallel") from error
        with ranks.lock:  # the others hear nothing else meanwhile
            ranks.tell("load_model", {"source": source, "options": told})
            return load_part(ranks, source, options)
    return load_part(ranks, source, options)


def load_part(ranks: Ranks, source: str, options: dict[str, Any]) -> PreTrainedModel:
    """The part of a model that this rank holds; if one rank cannot load its part, none does."""
    from draftgraph import private
    from draftgraph.engine.sharding import group_of
    from draftgraph.models.ranks import LATE, loading

    def part() -> PreTrainedModel:
        try:
            return read_part(ranks, source, options)
        except Exception as error:
            raise explain(error, source) from error

    with loading(ranks):
        model = ranks.all_or_none(part)
        if not ranks.scripted:
            private.set_group_timeout(group_of(model), LATE)
        ranks.adopt(model)
    return model


def read_part(ranks: Ranks, source: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    from draftgraph.engine.sharding import attention_is_whole, group_of, plan_for
    from draftgraph.models.packed_model import is_packed_folder

    folder, options = Path(source), dict(options)
    if is_packed_folder(folder) or (folder / "adapter_config.json").is_file():
        raise UsageError(f"{source} has packed weights or an adapter, which cannot be split over ranks: give its model")
    wanted, plan, _ = (options.pop(name, None) for name in ("distributed_config", "tp_plan", "tp_size"))
    shared = {key: options[key] for key in SHARED_WITH_TOKENIZER if key in options}
    config = options.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(source, trust_remote_code=options["trust_remote_code"], **shared)
    if wanted is None and plan in (None, "auto"):
        text = config.get_text_config(decoder=True)
        text.base_model_tp_plan = plan_for(text, ranks.size)
        if ranks.leads and attention_is_whole(text, ranks.size):
            notice(f"its heads cannot be shared out over {ranks.size} ranks: each computes all of the attention")
    wanted = wanted or DistributedConfig(tp_size=ranks.size, tp_plan=plan or "auto")
    model = read_model(source, options | {"config": config, "distributed_config": wanted})
    if group_of(model) is None:
        raise UsageError(f"transformers has no plan to split a {type(model).__name__} over {ranks.size} ranks")
    return model


def keeps_its_bits(model: Any) -> bool:
    """Whether rows of a model on a CPU are computed independently of each other in its own dtype."""
    import torch

    from draftgraph.engine.program import program_of

    return model.dtype == torch.float32 or (model.dtype == torch.bfloat16 and program_of(model) is not None)


def find_source(spec: Any, role: str, revision: str | None, options: dict[str, Any], few_bits: bool = False) -> str:
    """The folder to read, GGUF files converted into one, or the hub name. `few_bits`: as the file has them."""
    if spec is None:
        if role == "draft":
            raise UsageError("no draft model was named: give a name, a folder, a GGUF file or a module")
        return str(default_model(few_bits))
    if not isinstance(spec, str | os.PathLike) or not str(spec).strip():
        raise UsageError(f"the {role} {spec!r} is no model: give a hub name, a folder, a GGUF file or a module")
    path = Path(os.path.expanduser(spec))
    gguf_file = options.pop("gguf_file", None)
    if gguf_file is not None and not os.path.isdir(path):
        path = gguf_from_hub(str(spec), gguf_file, revision, options)
    elif gguf_file is not None:
        path = path / gguf_file
    if os.path.isdir(path):  # pathlib raises for names that no file can have
        return folder_source(path, options, few_bits)
    if os.path.isfile(path):
        if not is_gguf(path):
            raise LoadError(f"{path} is not a GGUF file: give the model's folder, a GGUF file or a hub name")
        return str(converted_folder(path, few_bits))
    if path.suffix == ".gguf" or path.is_absolute() or str(spec).startswith((".", "~")) or len(path.parts) > 2:
        raise LoadError(f"there is no folder or file {path}: check the path")
    if folder := cached_copy(str(spec), revision, options):
        return folder_source(folder, options, few_bits)
    return str(spec)


def folder_source(folder: Path, options: dict[str, Any], few_bits: bool = False) -> str:
    """The folder itself, or the converted form of the one GGUF file that is all it has."""
    where = folder / (options.get("subfolder") or "")
    try:
        names = {file.name for file in where.iterdir()}
    except OSError as error:
        raise LoadError(f"the folder {where} cannot be read: {error.strerror}; check it") from error
    if "adapter_config.json" in names:
        return str(folder)
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        if len(ggufs) == 1:
            return str(converted_folder(where / ggufs[0], few_bits))
        hint = f"name one of its GGUF files, {ggufs[0]} for one" if ggufs else "give the folder save_pretrained wrote"
        raise LoadError(f"the folder {where} has no config.json: {hint}")
    if not options["use_safetensors"] or any(".safetensors" in name for name in names):
        return str(folder)
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise LoadError(
            f"the folder {where} has only pickle weights, which can run code: convert them to safetensors, "
            "or pass use_safetensors=False if you trust them"
        )
    raise LoadError(f"the folder {where} has no weights (*.safetensors): copy or fetch the model again")


def read_model(source: str, options: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftgraph.models.packed_model import is_packed_folder, load_packed

    auto: Any = AutoModelForCausalLM  # typed as if the loading info never came along
    model: PreTrainedModel
    try:
        with quiet_transformers(bars=True):
            if is_packed_folder(Path(source)):
                return load_packed(Path(source), AutoConfig.from_pretrained(source))
            refuse_unless_causal(source, options)
            model, info = auto.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:
        raise explain(error, source) from error
    if not getattr(model, "is_quantized", False):  # there, packed weights have other names
        refuse_missing_weights(info, source)
    return model


def refuse_unless_causal(source: str, options: dict[str, Any]) -> None:
    """transformers loads even an encoder as a causal model, with a new random head: refuse that by name."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    shared = {key: options[key] for key in SHARED_WITH_TOKENIZER if key in options}
    if find_adapter_config_file(source, **shared):
        return
    config = options.get("config") or AutoConfig.from_pretrained(
        source, trust_remote_code=options["trust_remote_code"], **shared
    )
    if "AutoModelForCausalLM" in getattr(config, "auto_map", {}) and options["trust_remote_code"]:
        return
    names = config.architectures or []
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    is_encoder = getattr(config, "is_decoder", None) is False and names and not generates
    if config.is_encoder_decoder or is_encoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = names[0] if names else type(config).__name__
        raise LoadError(
            f"{source} is a {kind} (model type {config.model_type}), not a causal language model: "
            "choose a decoder-only text model"
        )


def choose_device(device: str | int | torch.device | None) -> torch.device:
    """The requested device, or CUDA where there is one."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"there is no device {device!r}: use cpu, cuda or cuda:0") from error
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UsageError(
                f"device {str(device)!r} was asked for but this PyTorch finds no CUDA device: "
                "use device='cpu', or install a driver and a CUDA build of PyTorch"
            )
        if chosen.index is not None and chosen.index >= count:
            raise UsageError(f"there is no device {str(device)!r}: the last CUDA device here is cuda:{count - 1}")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' was asked for but this PyTorch finds none: use device='cpu'")
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """float32, or bfloat16 on CUDA, unless another is requested; "auto" is the checkpoint's own."""
    import torch

    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "auto":
        return "auto"
    found: Any = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        found = getattr(torch, SHORT_NAMES.get(name, name), None)
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    raise UsageError(f"dtype {str(dtype)!r} is not one to compute in: use {POSSIBLE}")


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub model; None where it has none."""
    from transformers import AutoTokenizer
    from transformers.utils.hub import cached_file

    wanted = {"_raise_exceptions_for_missing_entries": False} | options
    wanted.pop("trust_remote_code", None)
    try:
        with quiet_transformers(bars=True):
            # Where there is no file, transformers makes an empty tokenizer for some families, or fails in many ways.
            if not any(cached_file(source, file, **wanted) for file in TOKEN_FILES):
                return None
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
            return tokenizer
    except Exception as error:
        raise explain(error, source, "the tokenizer of ") from error


def tokenizer_of_module(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the local folder that a module was loaded from; the network is never asked."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or getattr(model, "name_or_path", None)
    if not isinstance(name, str) or not name or not Path(name).is_dir():
        return None
    return load_tokenizer(name, local_files_only=True)


def other_tokens(target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> str | None:
    """How a draft's tokens differ from the target's, if they do; padding and a few more at the end are fine."""
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return None
    target_by_id, draft_by_id = ({index: token for token, index in vocab.items()} for vocab in (target, draft))
    shared_end = min(max(target_by_id, default=-1), max(draft_by_id, default=-1)) + 1
    common = ((index, target_by_id.get(index), draft_by_id.get(index)) for index in range(shared_end))
    unlike = next((one for one in common if one[1] is not None and one[1] != one[2]), None)
    lacking = sum(index >= shared_end for index in target_by_id)
    if unlike is not None:
        index, ours, theirs = unlike
        return f"token {index} is {ours!r} for the target and {theirs!r} for the draft"
    return f"{lacking} tokens are missing" if lacking > max(FEW, len(target_by_id) // 100) else None
