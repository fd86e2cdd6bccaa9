"""The whole matrix: every kind of kill at every phase, under every data-parallel plan.

Each storm is one run that suffers one fault at each phase in turn.
"""

from __future__ import annotations

import pytest

from elastic_train.config import Parallelism
from elastic_train.control.faults import PHASES, Fault, FaultSchedule, KillNode, KillRank, Moment, StopRank
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 40

PLANS = {
    "dp2": Parallelism(dp_replicate=2, dp_shard=1),
    "dp3": Parallelism(dp_shard=1),
    "hsdp": Parallelism(dp_replicate=2, dp_shard=2),
    "fsdp": Parallelism(dp_replicate=1, dp_shard=2),
}
KINDS = ("rank 0", "rank 1", "stopped", "node")


def storm(kind: str) -> FaultSchedule:
    """One fault at each phase, five steps apart; saves are due at every fifth step."""
    faults: list[Fault] = []
    for number, phase in enumerate(PHASES):
        when = Moment(step=5 * (number + 1), phase=phase)
        match kind:
            case "node" if phase in ("backward", "vote"):
                faults.append(KillNode(when=when, node=f"n{number % 3}"))
            case "stopped":
                faults.append(StopRank(when=when, rank=1, seconds=None))
            case _:
                faults.append(KillRank(when=when, rank=1 if kind == "rank 1" else 0))
    return FaultSchedule(faults=tuple(faults), seed=0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", ""))
def test_a_storm_leaves_the_losses_as_they_were(runs: Runs, plan: str, kind: str) -> None:
    parallelism = PLANS[plan]
    ranks = (parallelism.dp_replicate or 3) * (parallelism.dp_shard or 1)
    while len(runs.cluster.nodes) < NODES:  # the storm before took some
        runs.cluster.add_node()
    rough = runs.disturbed(
        f"{plan}-{kind}".replace(" ", ""),
        storm(kind),
        workers=f"1:{ranks}" if plan == "dp3" else f"{parallelism.dp_shard or 1}:{ranks}",
        max_steps=STEPS,
        standby=6 - ranks,
        parallelism=Parallelism(dp_shard=parallelism.dp_shard)
        if (parallelism.dp_replicate or 3) > 1
        else parallelism,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    source = {r.formed.generation: r.formed.source for r in rough.records if r.formed is not None}
    again = {source[entry.superseded_by] for entry in rough.ledger.superseded if entry.superseded_by}
    assert "live" not in again, "while a copy is left no committed step is run again"
