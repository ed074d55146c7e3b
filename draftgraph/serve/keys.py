"""API keys: who may ask, and a name for each that tells nothing of the key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from draftgraph.errors import UsageError

TENANT_LENGTH = 32


class Keys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: bytes | None) -> str | None:
        """Of the bearer of a key; None if he is not let in. Takes as long for a wrong key as for a right one."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return given[:TENANT_LENGTH] if any(matches) and scheme.lower() == b"bearer" else None


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_keys(file: Path | None, environment: str | None) -> tuple[str, ...]:
    """Keys of a file, one a line, and of an environment variable, with commas between them."""
    found = [key.strip() for key in (environment or "").split(",")]
    if file is not None:
        found += keys_of_file(file)
    return tuple(dict.fromkeys(key for key in found if key))


def keys_of_file(file: Path) -> list[str]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"the keys in {file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: give a file with one key a line") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"{file} has no keys: give a file with one key a line")
    return keys
