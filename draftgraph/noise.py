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


class KeyedNoise:
    """An endless table of noise, read by position; reading never changes it."""

    def __init__(self, seed: int, sample: int = 0) -> None:
        self.key = mix(mix(seed & MASK) ^ sample)
        self._rows: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def uniform(self, position: int, size: int, device: torch.device, stream: int = CHOICE) -> Tensor:
        """Numbers in (0, 1), one per token. # [size] float64"""
        row_key = mix(mix(self.key ^ stream) ^ position)
        bits = torch.arange(1, size + 1, device=device) * signed(GOLDEN) + signed(row_key)
        for shift, factor in MIX:
            bits = (bits ^ shift_right(bits, shift)) * signed(factor)
        bits = bits ^ shift_right(bits, 31)
        return (shift_right(bits, 12).double() + 0.5) * 2.0**-52  # 53 bits in all, so exact: never 0 or 1

    def gumbel(self, position: int, size: int, device: torch.device, stream: int = CHOICE) -> Tensor:
        """Noise that turns an argmax over log-probabilities into an exact sample. # [size] float64"""
        key = (position, size, stream, device)
        if key not in self._rows:
            self._rows[key] = -torch.log(-torch.log(self.uniform(position, size, device, stream)))
        return self._rows[key]

    def forget_before(self, position: int) -> None:
        self._rows = {key: row for key, row in self._rows.items() if key[0] >= position}
