"""Explain how often a run saves, from its configuration and its controller's decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_train.control.events import PeersHeld
from elastic_train.control.schedule import PEER_SHARE, peer_interval_s
from elastic_train.observe.journal_records import Record
from elastic_train.planner.plan import counted

MB = 1e6


def saving(config: Mapping[str, object], records: Sequence[Record]) -> str:
    """Both tiers; of storage's the reason that was given last, of peer memory's what peer stores said
    last.
    """
    return f"checkpoints {_storage(config, records)}; peer memory {_peers(config, peers_held(records))}"


def peers_held(records: Sequence[Record]) -> tuple[PeersHeld, ...]:
    """What the peer stores of the newest group's nodes said last."""
    nodes: frozenset[str] = frozenset()
    said: dict[str, PeersHeld] = {}
    for record in records:
        if record.formed is not None:
            nodes = frozenset(record.formed.nodes)
        if isinstance(record.event, PeersHeld):
            said[record.event.node] = record.event
    return tuple(held for node, held in sorted(said.items()) if node in nodes)


def _storage(config: Mapping[str, object], records: Sequence[Record]) -> str:
    every = config.get("checkpoints.every", "auto")
    if every != "auto":
        return f"every {every} steps, as configured"
    said = (record.cadence for record in reversed(records) if record.cadence)
    return next(said, "at an interval that is not measured yet")


def _peers(config: Mapping[str, object], held: Sequence[PeersHeld]) -> str:
    every = config.get("checkpoints.peers")
    match every:
        case None:
            return "is not used"
        case "auto" if held:
            newest = max(held, key=lambda one: one.step)
            reported = (
                f"every {newest.every:.3g} steps: a snapshot takes {newest.cost_s:.2g} s from "
                f"training, at most {PEER_SHARE:.0%} of the time may go into that, so one is due every "
                f"{peer_interval_s(newest.cost_s):.2g} s"
            )
        case "auto":
            reported = f"as often as it costs {PEER_SHARE:.0%} of the time at most, every step where it can"
        case _:
            reported = ("at every step" if every == 1 else f"every {every} steps") + ", as configured"
            if held:
                reported += f", every {max(held, key=lambda one: one.step).every:.3g} as measured"
    return reported + (f" ({_figures(held)})" if held else "")


def _figures(held: Sequence[PeersHeld]) -> str:
    own, copies, room, spilled = (
        sum(getattr(one, name) for one in held) / MB for name in ("own", "copies", "room", "spilled")
    )
    return (
        f"{own:.3g} MB of segments and {copies:.3g} MB of copies in object stores of {room:.3g} MB on "
        f"{counted(len(held), 'node')}, {spilled:.3g} MB spilled to disk"
    )
