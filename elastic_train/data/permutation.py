"""A keyed permutation of 0 .. n-1 in constant memory: any position is computed alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elastic_train.data.hash_mix import U64, mix64

ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Permutation:
    """The order of one epoch: position -> sample id, a bijection of 0 .. length-1.

    A balanced Feistel network over the smallest 2^(2h) >= length, h >= 1 (Luby and Rackoff, SIAM J. Comput.
    1988). A result outside the range is encrypted again until it falls inside: cycle walking (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). The domain is at most four times the range,
    so at most four passes are expected for an element.
    """

    length: int
    seed: int
    epoch: int
    _half: int = field(init=False, repr=False, compare=False)  # bits of one half
    _keys: U64 = field(init=False, repr=False, compare=False)  # one per round

    def __post_init__(self) -> None:
        assert 0 < self.length <= 1 << 62, "a permutation needs between 1 and 2^62 elements"
        half = max(1, -(-(self.length - 1).bit_length() // 2))
        digest = hashlib.blake2b(f"sample order {self.seed} {self.epoch}".encode(), digest_size=8 * ROUNDS)
        object.__setattr__(self, "_half", half)
        object.__setattr__(self, "_keys", np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64))

    def __call__(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Sample ids at these positions, in the same order."""
        wanted = np.asarray(positions)
        assert np.all((wanted >= 0) & (wanted < self.length)), "a position outside the permutation"
        values = self._encrypt(wanted.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= np.uint64(self.length)]
        return values.astype(np.int64).reshape(wanted.shape)

    def _encrypt(self, values: U64) -> U64:
        bits, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        return (left << bits) | right
