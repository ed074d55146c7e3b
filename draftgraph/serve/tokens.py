"""What a single token is called where answers tell of tokens: its bytes, and a text for them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte
SPACE = "\u2581"  # and a space


class TokenNames:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {int(id): str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._is_byte_level = "Ġ" in tokenizer.get_vocab()
        self.bytes = lru_cache(maxsize=65536)(self._bytes)

    def text(self, token: int) -> str:
        """Half a character shows as a replacement character."""
        return self.bytes(token).decode("utf-8", "replace")

    def key(self, token: int) -> str:
        """Tells apart tokens that are no text of their own, in the way that OpenAI does."""
        found = self.bytes(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # vocabularies are padded
            return b""
        if self._is_byte_level:
            return b"".join(BYTES.get(sign) or sign.encode() for sign in name)
        if byte := BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return str(name).replace(SPACE, " ").encode()


def byte_signs() -> dict[str, bytes]:
    """The printable characters that stand for bytes in GPT-2's vocabulary and its successors'."""
    themselves = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in themselves]
    signs = {chr(byte): bytes([byte]) for byte in themselves}
    return signs | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


BYTES = byte_signs()
