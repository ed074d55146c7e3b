"""A model's tokenizer, and whether two models share one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgraph.errors import UsageError
from draftgraph.models.faults import explain
from draftgraph.models.progress import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
FEW = 64  # added tokens by which tokenizers of one family differ at the end


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub model; None where it has none."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(bars=True):
            if not has_tokenizer(source, options):
                return None
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
            return tokenizer
    except Exception as error:
        raise explain(error, source, "the tokenizer of ") from error


def has_tokenizer(source: str, options: dict[str, Any]) -> bool:
    # transformers makes an empty tokenizer for some families, or fails for a dozen reasons, where there is no file.
    from transformers.utils.hub import cached_file

    kept = {key: value for key, value in options.items() if key != "trust_remote_code"}
    return any(cached_file(source, file, _raise_exceptions_for_missing_entries=False, **kept) for file in FILES)


def tokenizer_of_module(model: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the local folder that a module was loaded from; the network is never asked."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or getattr(model, "name_or_path", None)
    if not isinstance(name, str) or not name or not Path(name).is_dir():
        return None
    return load_tokenizer(name, local_files_only=True)


def check_same_tokens(target_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose tokens have other ids than the target's; padding and a few more at the end are fine."""
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return
    target_by_id, draft_by_id = ({index: token for token, index in vocab.items()} for vocab in (target, draft))
    shared_end = min(max(target_by_id, default=-1), max(draft_by_id, default=-1)) + 1
    for index in range(shared_end):
        ours, theirs = target_by_id.get(index), draft_by_id.get(index)
        if ours is not None and ours != theirs:
            raise _refusal(draft_tokenizer, f"token {index} is {ours!r} for the target and {theirs!r} for the draft")
    lacking = sum(index >= shared_end for index in target_by_id)
    if lacking > max(FEW, len(target_by_id) // 100):
        raise _refusal(draft_tokenizer, f"{lacking} of its tokens are missing")


def _refusal(draft_tokenizer: PreTrainedTokenizerBase, reason: str) -> UsageError:
    name = draft_tokenizer.name_or_path or type(draft_tokenizer).__name__
    return UsageError(
        f"the draft {name} does not share the target's tokenizer: {reason}; choose a draft of the same family"
    )
