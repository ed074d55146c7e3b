"""GGUF files: read through transformers, put right, and converted once into a folder of safetensors in the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from draftgraph.errors import LoadError, one_line
from draftgraph.files import cache_dir, disk_full, only_one, remembered_sha256, sha256_of, writing
from draftgraph.models.faults import explain, quiet_transformers
from draftgraph.notices import Report, notice, progress_bar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1  # raise it when the files a conversion writes change: older copies are then made again
MANIFEST = "manifest.json"
HASHED_BELOW = 32 << 20  # larger files are checked by size and header: a start must not read all weights twice
LINK = "model.gguf"
PLAIN = {"F32", "F16", "BF16", "F64"}  # formats of weights that PyTorch has too
SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
# llama.cpp splits numbers off before anything else for these values of tokenizer.ggml.pre; transformers does not.
DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def folder_for(stem: str, sha256: str, packed: bool = False) -> Path:
    """Where the converted form of a GGUF file with this content is kept."""
    safe_stem = re.sub(r"[^\w.-]", "_", stem)
    return cache_dir() / ("packed" if packed else "converted") / f"{safe_stem}-{sha256[:16]}"


def converted_folder(gguf: Path, packed: bool = False) -> Path:
    """The safetensors folder of a GGUF file: from the cache if it is intact there, else converted now. `packed`: with
    weights of as few bits as the file has."""
    gguf = gguf.absolute()  # not resolved: in the hub cache a link has the name, its target only a hash
    try:
        sha256 = remembered_sha256(gguf)
        folder = folder_for(gguf.stem, sha256, packed)
        if packed and fault_of(folder) and not has_few_bits(gguf):
            packed, folder = False, folder_for(gguf.stem, sha256)
    except OSError as error:
        raise LoadError(f"{gguf} cannot be read ({one_line(error)}): check the path and its permissions") from error
    if fault_of(folder):
        with only_one(folder, f"another process is converting {gguf.name}: waiting for it"):
            if fault := fault_of(folder):
                again = f"the cached copy of {gguf.name} cannot be used ({fault}): converting it again"
                once = f"converting {gguf.name} once, for fast starts from now on; kept in {folder}"
                notice(again if folder.exists() else once)
                convert(gguf, folder, packed)
    return folder


def convert(gguf: Path, folder: Path, packed: bool = False) -> None:
    """Write `folder` beside its place and move it there when all of it is good. The caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
    what = f"the converted {gguf.name}"
    with progress_bar(f"converting {gguf.name}") as report:
        source = GGUFFile(gguf)
        needed = source.path.stat().st_size if packed else source.float32_bytes
        if shutil.disk_usage(folder.parent).free < needed:
            raise LoadError(disk_full(what, folder.parent, needed))
        report(0.1)
        model, tokenizer = source.read(report, packed)
        report(0.9)
        try:
            with writing(what, folder.parent), quiet_transformers():
                if packed:
                    from draftgraph.models.packed_model import save_packed

                    save_packed(model, partial)
                else:
                    model.save_pretrained(partial)
                if tokenizer is not None:
                    tokenizer.save_pretrained(partial)
                write_manifest(partial, gguf)
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_manifest(folder: Path, gguf: Path) -> None:
    files = {file.name: describe(file) for file in sorted(folder.iterdir())}
    content = {"format": FORMAT, "source": gguf.name, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2))


def describe(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"size": size, "sha256": sha256_of(file) if size < HASHED_BELOW else None}


def fault_of(folder: Path) -> str | None:
    """What is wrong with a converted folder, found without reading the weights; None if it can be used."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return "made by another version of draftgraph"
        for name, expected in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if describe(file) != expected or not header_is_sound(file):
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def header_is_sound(file: Path) -> bool:
    """Whether a safetensors file's header describes exactly the bytes that follow; true of other files."""
    if file.suffix != ".safetensors":
        return True
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            return False
        header = json.loads(stream.read(length))
    tensors = (value for name, value in header.items() if name != "__metadata__")
    end = max((value["data_offsets"][1] for value in tensors), default=0)
    return bool(8 + length + end == file.stat().st_size)


def is_gguf(file: Path) -> bool:
    """Whether a file says that it is GGUF, whatever its name."""
    try:
        with file.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def has_few_bits(gguf: Path) -> bool:
    """Whether a file has weights in fewer bits than PyTorch has numbers for, and experts none of them."""
    from gguf import GGUFReader

    with suppress(Exception):  # a damaged one is explained when it is converted
        tensors = GGUFReader(gguf).tensors
        formats = {tensor.tensor_type.name for tensor in tensors}
        return bool(formats - PLAIN) and all(len(tensor.shape) <= 2 for tensor in tensors)
    return False


class GGUFFile:
    """Metadata and size of a GGUF file."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
            # The long arrays (tokens, merges, scores) are transformers' to read.
            self.fields: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 1
            }
            self.float32_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
            self.has_tokenizer = "tokenizer.ggml.tokens" in reader.fields
        except Exception as error:  # the reader trusts the file: a damaged one fails in many ways
            raise LoadError(
                f"{path} cannot be read as GGUF, it is cut short or damaged ({one_line(error)}): fetch it again"
            ) from error
        if self.fields.get("split.count", 1) > 1:
            raise LoadError(f"{path} is one part of a split GGUF: join the parts with llama-gguf-split --merge first")

    def token_id(self, key: str) -> int | None:
        value = self.fields.get(f"tokenizer.ggml.{key}")
        return None if value is None else int(value)

    def read(self, report: Report, packed: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        """The model, in float32 or packed, and its tokenizer, ready to be saved."""
        with quiet_transformers(), watch_gguf_tensors(lambda done: report(0.4 + 0.5 * done)):
            try:
                with isolated(self.path) as folder:
                    tokenizer = self._tokenizer(folder) if self.has_tokenizer else None
                    report(0.3)
                    model = self._packed_model(folder, report) if packed else self._model(folder)
            except Exception as error:
                raise explain(error, str(self.path)) from error
        self._set_stop_tokens(model, tokenizer)
        if not packed:
            narrow_without_loss(model)
        return model, tokenizer

    def _packed_model(self, folder: str, report: Report) -> PreTrainedModel:
        """Tensor by tensor, by transformers' own names and order of rows."""
        import torch
        from gguf import GGUFReader, dequantize
        from transformers import AutoConfig
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
        )

        from draftgraph.models.gguf_formats import packed_tensor
        from draftgraph.models.packed_model import bare_model, finish, set_weight

        auto: Any = AutoConfig
        model = bare_model(auto.from_pretrained(folder, gguf_file=LINK))
        told: Any = load_gguf_checkpoint(str(self.path))
        kind: Any = TENSOR_PROCESSORS.get(self.fields["general.architecture"], TensorProcessor)
        processor = kind(config=told["config"])
        names, tensors = get_gguf_hf_weights_map(model, processor), GGUFReader(self.path).tensors
        more = {"tensor_key_mapping": names, "parsed_parameters": told}
        for number, tensor in enumerate(tensors):
            report(0.4 + 0.5 * number / len(tensors))
            if tensor.name not in names:
                continue
            rows = np.arange(int(tensor.shape[-1]))
            order = processor.process(weights=rows[:, None].astype(np.float64), name=tensor.name, **more).weights
            weight: Any = packed_tensor(tensor, order[:, 0].astype(int) if len(tensor.shape) == 2 else None)
            if weight is None:
                plain = dequantize(tensor.data, tensor.tensor_type)
                weight = torch.from_numpy(np.copy(processor.process(weights=plain, name=tensor.name, **more).weights))
            set_weight(model, names[tensor.name], weight)
        finish(model)
        missing = [name for name, weight in model.named_parameters() if weight.is_meta]
        refuse_missing_weights({"missing_keys": missing}, str(self.path))
        vars(model.config).pop("_model_name_or_path", None)
        return model

    def _model(self, folder: str) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        auto: Any = AutoModelForCausalLM  # typed as if the loading info never came along
        model: PreTrainedModel
        model, info = auto.from_pretrained(
            folder,
            gguf_file=LINK,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        refuse_missing_weights(info, str(self.path))
        vars(model.config).pop("_model_name_or_path", None)  # the file's general.name under a key nothing reads
        return model

    def _tokenizer(self, folder: str) -> PreTrainedTokenizerBase:
        from tokenizers import pre_tokenizers
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=LINK)
        for key in [key for key in tokenizer.init_kwargs if key.endswith("_token_id")]:
            del tokenizer.init_kwargs[key]
        for name, key in SPECIAL.items():  # transformers 5.17 takes bos for eos
            if (token_id := self.token_id(key)) is not None:
                setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))
        if self.fields.get("tokenizer.ggml.add_bos_token") and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
        if self.fields.get("tokenizer.ggml.pre") in DIGITS_APART:
            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
        tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
        context = self.fields.get(f"{self.fields.get('general.architecture')}.context_length")
        if context:
            tokenizer.model_max_length = tokenizer.init_kwargs["model_max_length"] = int(context)
        return tokenizer  # type: ignore[no-any-return]

    def _set_stop_tokens(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        from transformers import GenerationConfig

        ends = [self.token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        if tokenizer is not None:
            ends += ends_of_turn(str(tokenizer.chat_template or ""), tokenizer.get_vocab())
        known = list(dict.fromkeys(end for end in ends if end is not None))
        model.generation_config = GenerationConfig(
            bos_token_id=self.token_id("bos_token_id"),
            eos_token_id=known[0] if len(known) == 1 else known or None,
            pad_token_id=self.token_id("padding_token_id"),
        )


@contextmanager
def isolated(gguf: Path) -> Iterator[str]:
    """A folder with this file only: transformers prefers a tokenizer.json that happens to lie beside it."""
    with TemporaryDirectory() as folder:
        link = Path(folder) / LINK
        try:
            link.symlink_to(gguf.absolute())
        except OSError:  # Windows without the right to make links
            link.hardlink_to(gguf.absolute())
        yield folder


def ends_of_turn(chat_template: str, vocabulary: dict[str, int]) -> list[int]:
    """Tokens that end an answer in this chat template though the file may not call them eos."""
    return [
        vocabulary[token]
        for token in ENDS_OF_TURN
        if token in chat_template
        and token in vocabulary
        # In the harmony format <|end|> closes one part of an answer and <|return|> the whole.
        and not (token == "<|end|>" and "<|return|>" in vocabulary)
    ]


def narrow_without_loss(model: PreTrainedModel) -> None:
    """Store in 16 bits what came from 16 bits: an F16 or BF16 file must not double in the cache."""
    import torch

    for parameter in model.parameters():
        for dtype in (torch.bfloat16, torch.float16):
            narrow: torch.Tensor = parameter.data.to(dtype)
            if torch.equal(narrow.to(parameter.dtype), parameter.data):
                parameter.data = narrow
                break


def refuse_missing_weights(info: dict[str, Any], name: str) -> None:
    """Refuses what transformers would do: fill missing weights with random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise LoadError(
            f"{name} lacks {len(missing)} weight{'s' * (len(missing) > 1)} of its model, {missing[0]} for one: "
            "it is incomplete or not a causal language model; choose another or fetch it again"
        )


@contextmanager
def watch_gguf_tensors(report: Report) -> Iterator[None]:
    """Follow transformers' loop over the tensors of a GGUF file, which has no callback but a tqdm of its own."""
    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")

    def watched(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            report(index / len(tensors))
            yield tensor

    original = getattr(loader, "tqdm", None)
    loader.tqdm = watched
    try:
        yield
    finally:
        loader.tqdm = original
