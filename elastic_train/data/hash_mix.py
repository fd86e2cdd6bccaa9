"""A 64-bit mixer: nearby integers become unrelated ones, equally on every platform."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def mix64(values: U64) -> U64:
    """Bijective finaliser of SplitMix64 on each element.

    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants are David
    Stafford's variant 13. Integer arithmetic modulo 2^64 only, so results are the same everywhere.
    """
    z = values.astype(np.uint64, copy=True)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
