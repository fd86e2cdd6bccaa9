"""Explains a recovery in one sentence, for the journal and the status."""

from __future__ import annotations

from elastic_train.planner.plan import counted
from elastic_train.recovery.evidence import Live, Logged, Mixed

HOLD = ("holds", "hold")


def _stages(log: Logged) -> str:
    first, stop = log.stages
    return f"stage {first} is" if log.width == 1 else f"stages {first} to {stop - 1} are"


def assembled(origin: Live | Mixed, workers: int) -> str:
    """Where the parts of a step come from; `workers` survivors serve some."""
    means = [
        *(["rolling forward"] if origin.vote is not None else []),
        *(["undoing a step"] if origin.undo else []),
    ]
    after = f" after {' and '.join(means)}" if means else ""
    where = f"step {origin.step} of generation {origin.generation}"
    if isinstance(origin, Live):
        return f"{counted(workers, 'worker', HOLD)} {where}{after}"
    sources = [f"{counted(workers, 'worker', HOLD)} a part{after}"] if workers else []
    if origin.peers:
        peer_stores = len({snapshot.peer_store for snapshot in origin.peers})
        ranks = len({snapshot.rank for snapshot in origin.peers})
        sources.append(
            f"the part{'s' * (ranks > 1)} of {counted(ranks, 'rank', ('is', 'are'))} in the memory of "
            f"{counted(peer_stores, 'node')}"
        )
    if origin.stored is not None:
        sources.append("the rest is in the checkpoint of that step")
    sources += [f"{_stages(r.log)} replayed from step {r.base}" for r in origin.replays]
    return f"{where} is put together: {', '.join(sources)}"
