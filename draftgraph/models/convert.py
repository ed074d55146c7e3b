"""One conversion of a GGUF file into a folder of safetensors, kept in the cache: read in under a second ever after."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from draftgraph.errors import LoadError, one_line
from draftgraph.files import cache_dir, disk_full, only_one, remembered_sha256, sha256_of, writing
from draftgraph.models.gguf_file import GGUFFile
from draftgraph.models.progress import quiet_transformers
from draftgraph.notices import notice, progress_bar

FORMAT = 1  # raise it when the files a conversion writes change: older copies are then made again
MANIFEST = "manifest.json"
HASHED_BELOW = 32 << 20  # larger files are checked by size and header: a start must not read all weights twice


def folder_for(stem: str, sha256: str) -> Path:
    """Where the converted form of a GGUF file with this content is kept."""
    safe_stem = re.sub(r"[^\w.-]", "_", stem)
    return cache_dir() / "converted" / f"{safe_stem}-{sha256[:16]}"


def converted_folder(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file: from the cache if it is intact there, else converted now."""
    gguf = gguf.absolute()  # not resolved: in the hub cache a link has the name, its target only a hash
    try:
        folder = folder_for(gguf.stem, remembered_sha256(gguf))
    except OSError as error:
        raise LoadError(f"{gguf} cannot be read ({one_line(error)}): check the path and its permissions") from error
    if fault_of(folder) is None:
        return folder
    with only_one(folder, f"another process is converting {gguf.name}: waiting for it"):
        fault = fault_of(folder)
        if fault is None:
            return folder
        if folder.exists():
            notice(f"the cached copy of {gguf.name} cannot be used ({fault}): converting it again")
        else:
            notice(f"converting {gguf.name} once, for fast starts from now on; kept in {folder}")
        convert(gguf, folder)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder` beside its place and move it there when all of it is good. The caller holds the lock."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed
    what = f"the converted {gguf.name}"
    with progress_bar(f"converting {gguf.name}") as report:
        source = GGUFFile(gguf)
        if shutil.disk_usage(folder.parent).free < source.float32_bytes:
            raise LoadError(disk_full(what, folder.parent, source.float32_bytes))
        report(0.1)
        model, tokenizer = source.read(report)
        report(0.9)
        try:
            with writing(what, folder.parent), quiet_transformers():
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
