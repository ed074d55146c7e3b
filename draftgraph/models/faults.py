"""What transformers and the hub report: errors in one line that says what to do, warnings and bars kept quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from draftgraph.errors import DraftGraphError, LoadError, UsageError, causes, one_line
from draftgraph.files import is_disk_full

NO_SAFETENSORS = (
    "{} has no safetensors weights: choose a model that has, or pass use_safetensors=False "
    "to read pickle files, which can run code, if you trust them"
)
# What transformers says, in this order, and the line for it.
KNOWN_TEXTS = {
    "trust_remote_code": "{} needs its own code to run: read that code, "
    "then pass trust_remote_code=True if you trust it",
    "does not recognize this architecture": "{} is of a kind that this transformers does not know: "
    "pip install --upgrade transformers",
    "Unrecognized configuration class": "{} is not a causal language model: choose a decoder-only text model",
    "not a valid JSON file": "the config.json of {} is not valid JSON: fetch the model again",
    "does not appear to have a file named config.json": "{} has no config.json: choose another model, "
    "or pass gguf_file=... for a GGUF file in it",
    "does not appear to have a file named": NO_SAFETENSORS,
    "no file named": NO_SAFETENSORS,
}


def explain(error: Exception, name: str, part: str = "") -> DraftGraphError:
    """The line for a model, or a part of one, that could not be loaded, from whatever transformers raised."""
    if isinstance(error, DraftGraphError):
        return error
    for cause in causes(error):
        if line := _known(cause, name):
            return LoadError(line)
    if is_disk_full(error):
        return LoadError(f"the disk is full: {name} could not be kept; free some space or set HF_HOME to another disk")
    text = " ".join(str(error).split())
    for known, line in KNOWN_TEXTS.items():
        if known in text:
            return LoadError(line.format(name))
    if isinstance(error, FileNotFoundError):
        return LoadError(f"{name} is incomplete, {one_line(error)}: fetch it again")
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return UsageError(f"{name} does not take this argument: {one_line(error)}")
    return LoadError(f"cannot load {part}{name}: {one_line(error)} ({type(error).__name__})")


def _known(cause: BaseException, name: str) -> str | None:
    import torch
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    reason = one_line(cause)
    damaged = f"the weights of {name} cannot be read, a file is cut short or damaged ({reason}): fetch it again"
    lines: dict[type[BaseException], str] = {
        hub.GatedRepoError: f"{name} is gated: accept its terms on its hub page, "
        "then set HF_TOKEN to a token that may read it",
        hub.RepositoryNotFoundError: f"no model named {name} on the hub: check the name; a private one needs HF_TOKEN",
        hub.RevisionNotFoundError: f"{name} has no such revision on the hub: check the branch, tag or commit",
        hub.OfflineModeIsEnabled: not_cached(name),
        torch.OutOfMemoryError: f"{name} does not fit into the GPU memory: free some, choose a smaller dtype or model, "
        "or device='cpu'",
        MemoryError: f"{name} does not fit into memory: close other programs or choose a smaller dtype or model",
        SafetensorError: "" if is_disk_full(cause) else damaged,
        ImportError: f"{name} needs a package that is missing: {reason}",
    }
    return next((line for kind, line in lines.items() if isinstance(cause, kind)), None)


def not_cached(name: str) -> str:
    return (
        f"{name} is neither a local folder nor in the hub cache, and fetching is off: "
        "unset HF_HUB_OFFLINE and DRAFTGRAPH_OFFLINE, or name a folder or a GGUF file"
    )


@contextmanager
def quiet_transformers(bars: bool = False) -> Iterator[None]:
    """No warnings from transformers, unless TRANSFORMERS_VERBOSITY is set, and bars only where wanted."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if not (bars and sys.stderr.isatty()):
        logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
