"""How often a run saves, and why, in a sentence: from its configuration and what its controller decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_train.observe.records import Record

DUE = "a checkpoint is due, "


def saving(config: Mapping[str, object], records: Sequence[Record]) -> str:
    """Both tiers; of storage's the reason that was given last."""
    return f"checkpoints {_storage(config, records)}; peer memory {_peers(config)}"


def _storage(config: Mapping[str, object], records: Sequence[Record]) -> str:
    every = config.get("checkpoints.every", "auto")
    if every != "auto":
        return f"every {every} steps, as configured"
    said = next((r.reason for r in reversed(records) if DUE in r.reason), None)
    return "at an interval that is not measured yet" if said is None else said.partition(DUE)[2]


def _peers(config: Mapping[str, object]) -> str:
    every = config.get("checkpoints.peers")
    match every:
        case None:
            return "is not used"
        case "auto":
            return "as often as it costs 2 % of the time at most, every step where it can"
        case 1:
            return "at every step, as configured"
        case _:
            return f"every {every} steps, as configured"
