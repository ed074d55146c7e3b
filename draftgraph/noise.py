"""Gumbel noise from a counter: the same for a seed, a sample, a position and a token, whoever asks and when."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64 (Steele, Lea and Flood, 2014)
CHOICE, DRAFT, ACCEPTANCE, RESIDUAL = range(4)  # independent streams


def mix(value: int) -> int:
    value = (value + GOLDEN) & MASK
    for shift, factor in MIX:
        value = ((value ^ (value >> shift)) * factor) & MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def shift_right(bits: Tensor, by: int) -> Tensor:
    """A logical shift: torch's is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def uniform_of(tokens: Tensor, key: int | Tensor) -> Tensor:
    """Numbers in (0, 1), one per token, of the row with this key. # float64"""
    bits = mixed((tokens + 1) * signed(GOLDEN) + key)
    return (shift_right(bits, 12).double() + 0.5) * 2.0**-52  # 53 bits in all, so exact: never 0 or 1


class KeyedNoise:
    """An endless table of noise, read by position; reading never changes it."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        self.key = mix(mix(seed & MASK) ^ sample)
        self._rows: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def uniform(self, position: int, size: int, device: torch.device, stream: int = CHOICE) -> Tensor:
        """Numbers in (0, 1), one per token. # [size] float64"""
        return uniform_of(torch.arange(size, device=device), self._row_key(position, stream))

    def gumbel(self, position: int, size: int, device: torch.device, stream: int = CHOICE) -> Tensor:
        """Noise that turns an argmax over log-probabilities into an exact sample. # [size] float64"""
        key = (position, size, stream, device)
        if key not in self._rows:
            self._rows[key] = -torch.log(-torch.log(self.uniform(position, size, device, stream)))
        return self._rows[key]

    def stream_key(self, stream: int) -> int:
        return mix(self.key ^ stream)

    def _row_key(self, position: int, stream: int) -> int:
        return signed(mix(self.stream_key(stream) ^ position))

    def forget_before(self, position: int) -> None:
        self._rows = {key: row for key, row in self._rows.items() if key[0] >= position}


def gumbel_rows(key: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`KeyedNoise.gumbel` where position and key are data, as a captured computation needs them; see `stream_key`.

    # [1], [rows], [tokens] int64 -> [rows, tokens] float64
    """
    keys = mixed((key ^ positions) + signed(GOLDEN))
    return -torch.log(-torch.log(uniform_of(tokens, keys[:, None])))


def mixed(bits: Tensor) -> Tensor:
    for shift, factor in MIX:
        bits = (bits ^ shift_right(bits, shift)) * signed(factor)
    return bits ^ shift_right(bits, 31)
