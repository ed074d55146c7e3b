"""Asks the hub once, quickly, before transformers would retry every file for a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftgraph.errors import LoadError, UsageError, one_line
from draftgraph.files import offline
from draftgraph.models.faults import explain, not_cached
from draftgraph.notices import notice

SECONDS = 10


def cached_copy(name: str, revision: str | None, options: dict[str, Any], file: str = "config.json") -> Path | None:
    """The hub cache's folder of a model, where the hub may not be asked or does not answer; None where it does.

    A folder leaves transformers nothing to ask for: told to use cached files only, it still asks for some.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        url = hf_hub_url(name, file, subfolder=options.get("subfolder"), revision=revision)
    except errors.HFValidationError as error:
        raise UsageError(f"{name!r} is no folder, no GGUF file and no possible hub name: check it") from error
    folder = find_in_cache(name, file, revision, options)
    if options.get("local_files_only") or offline():
        if folder is None:
            raise LoadError(not_cached(name))
        return folder
    try:
        get_hf_file_metadata(url, token=options.get("token"), timeout=SECONDS)
    except errors.EntryNotFoundError:
        return None  # an adapter has no config.json; transformers knows what to look for
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise explain(error, name) from error
    except Exception as error:  # httpx, sockets, proxies: whatever it was, the hub did not answer
        if folder is None:
            raise LoadError(
                f"the hub cannot be reached ({one_line(error)}) and {name} is not in its cache: "
                "check the network and HF_ENDPOINT, or name a folder or a GGUF file"
            ) from error
        notice(f"the hub does not answer ({one_line(error)}): using the cached copy of {name}")
        return folder
    return None


def find_in_cache(name: str, file: str, revision: str | None, options: dict[str, Any]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = Path(options.get("subfolder") or "") / file
    found = try_to_load_from_cache(name, path.as_posix(), options.get("cache_dir"), revision)
    return Path(found).parents[len(path.parts) - 1] if isinstance(found, str) else None


def gguf_from_hub(name: str, file: str, revision: str | None, options: dict[str, Any]) -> Path:
    from huggingface_hub import errors, hf_hub_download

    if folder := cached_copy(name, revision, options, file):
        return folder / (options.get("subfolder") or "") / file
    asked = {key: options[key] for key in ("cache_dir", "subfolder", "token") if key in options}
    try:
        return Path(hf_hub_download(name, file, revision=revision, **asked))
    except errors.EntryNotFoundError as error:
        raise LoadError(f"{name} has no file {file} on the hub: check gguf_file") from error
    except Exception as error:
        raise explain(error, name) from error
