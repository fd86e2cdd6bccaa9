"""How often to save: the interval that balances the cost of saving against the work a failure loses.

Young, "A first order approximation to the optimum checkpoint interval", CACM 1974: sqrt(2 x cost x mean time
between failures), valid while the cost is small against the mean time; Daly, FGCS 2006, has the higher
orders.
"""

from __future__ import annotations

import math

PEER_SHARE = 0.02
"""Share of the time that snapshots to peer memory may take: where they are cheaper, Young's interval is no
limit, as each one that is left out can only lose work."""

PRIOR_MTBF_S = 3600.0
FIRST_SAVE_S = 60.0


def mtbf_s(*, elapsed_s: float, failures: int) -> float:
    """Mean time between failures as observed, with one failure per hour as what is believed beforehand."""
    return (PRIOR_MTBF_S + elapsed_s) / (1 + failures)


def interval_s(*, save_s: float | None, elapsed_s: float, failures: int) -> float:
    """Seconds between two saves: Young's, never less than a save takes; before the first save a minute."""
    if save_s is None:
        return FIRST_SAVE_S
    return max(math.sqrt(2 * save_s * mtbf_s(elapsed_s=elapsed_s, failures=failures)), save_s)


def peer_interval_s(cost_s: float, mtbf: float = PRIOR_MTBF_S) -> float:
    """Seconds between two snapshots to peer memory, each of which takes `cost_s` from training: 0 until that
    is known.
    """
    return min(math.sqrt(2 * cost_s * mtbf), cost_s / PEER_SHARE)
