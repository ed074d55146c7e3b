"""Turns what goes wrong inside transformers and the hub into one line that says what to do."""

from __future__ import annotations

from draftgraph.errors import DraftGraphError, LoadError, UsageError, causes, one_line
from draftgraph.files import is_disk_full


def explain(error: Exception, name: str, part: str = "") -> DraftGraphError:
    """The line for a model, or a part of one, that could not be loaded, from whatever transformers raised."""
    if isinstance(error, DraftGraphError):
        return error
    text = " ".join(str(error).split())
    for cause in causes(error):
        if line := _known(cause, name):
            return LoadError(line)
    if is_disk_full(error):
        return LoadError(f"the disk is full: {name} could not be kept; free some space or set HF_HOME to another disk")
    if "trust_remote_code" in text:
        return LoadError(
            f"{name} needs its own code to run: read that code, then pass trust_remote_code=True if you trust it"
        )
    if "does not recognize this architecture" in text:
        return LoadError(
            f"{name} is of a kind that this transformers does not know: pip install --upgrade transformers"
        )
    if "Unrecognized configuration class" in text:
        return LoadError(f"{name} is not a causal language model: choose a decoder-only text model")
    if "not a valid JSON file" in text:
        return LoadError(f"the config.json of {name} is not valid JSON: fetch the model again")
    if "does not appear to have a file named config.json" in text:
        return LoadError(
            f"{name} has no config.json: choose another model, or pass gguf_file=... for a GGUF file in it"
        )
    if "does not appear to have a file named" in text or "no file named" in text:
        return LoadError(
            f"{name} has no safetensors weights: choose a model that has, or pass use_safetensors=False "
            "to read pickle files, which can run code, if you trust them"
        )
    if isinstance(error, FileNotFoundError):
        return LoadError(f"{name} is incomplete, {one_line(error)}: fetch it again")
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return UsageError(f"{name} does not take this argument: {one_line(error)}")
    return LoadError(f"cannot load {part}{name}: {one_line(error)} ({type(error).__name__})")


def _known(cause: BaseException, name: str) -> str | None:
    import torch
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    if isinstance(cause, hub.GatedRepoError):
        return f"{name} is gated: accept its terms on its hub page, then set HF_TOKEN to a token that may read it"
    if isinstance(cause, hub.RepositoryNotFoundError):
        return f"no model named {name} on the hub: check the name; a private one needs HF_TOKEN"
    if isinstance(cause, hub.RevisionNotFoundError):
        return f"{name} has no such revision on the hub: check the branch, tag or commit"
    if isinstance(cause, hub.OfflineModeIsEnabled):
        return not_cached(name)
    if isinstance(cause, torch.OutOfMemoryError):
        return f"{name} does not fit into the GPU memory: free some, choose a smaller dtype or model, or device='cpu'"
    if isinstance(cause, MemoryError):
        return f"{name} does not fit into memory: close other programs or choose a smaller dtype or model"
    if isinstance(cause, SafetensorError) and not is_disk_full(cause):
        return (
            f"the weights of {name} cannot be read, a file is cut short or damaged ({one_line(cause)}): fetch it again"
        )
    if isinstance(cause, ImportError):
        return f"{name} needs a package that is missing: {one_line(cause)}"
    return None


def not_cached(name: str) -> str:
    return (
        f"{name} is neither a local folder nor in the hub cache, and fetching is off: "
        "unset HF_HUB_OFFLINE and DRAFTGRAPH_OFFLINE, or name a folder or a GGUF file"
    )
