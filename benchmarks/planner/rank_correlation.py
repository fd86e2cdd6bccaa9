"""How alike two orders are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, 1.0 for the same order. Values are distinct."""
    one, other = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(one, other)[0, 1])
