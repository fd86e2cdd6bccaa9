"""`chaos`: faults on demand on a run that trains, once or again and again."""

from __future__ import annotations

import logging
import random
import threading
from typing import Annotated

import typer

from elastic_train.cli.exit_codes import exits
from elastic_train.cli.output import say_line
from elastic_train.errors import ConfigError, StorageNotFound

AUTO = "auto"


def chaos(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The run's directory: <storage_path>/<name>, a path or a URL."),
    ],
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="kill, stop, drain or cut (its collectives break).")
    ],
    worker: Annotated[str, typer.Option(help="By name, like w0001; any that trains by default.")] = "",
    rank: Annotated[int, typer.Option(help="The worker of this rank.")] = -1,
    node: Annotated[str, typer.Option(help="A whole node, by name, or random.")] = "",
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="How long a stop lasts, or the notice of a drain.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 1,
    every: Annotated[float, typer.Option(min=1.0, help="Mean seconds between two of them.")] = 60.0,
    seed: Annotated[int | None, typer.Option(help="Of whom and when, where that is random.")] = None,
    address: Annotated[
        str | None,
        typer.Option(envvar="RAY_ADDRESS", help="The run's Ray cluster; by default the local one."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Break machines other than this one, too.")] = False,
) -> None:
    """Break a worker or a node of a run on purpose. What was done is in the run's journal as that.

    It runs on a machine of the run's Ray cluster.
    """
    with exits():
        cause_chaos(
            run,
            action,
            worker=worker,
            rank=rank,
            node=node,
            seconds=seconds,
            times=times,
            every_s=every,
            seed=seed,
            address=address,
            yes=yes,
        )


def cause_chaos(
    run: str,
    action: str,
    *,
    worker: str,
    rank: int,
    node: str,
    seconds: float | None,
    times: int,
    every_s: float,
    seed: int | None,
    address: str | None,
    yes: bool,
) -> None:
    """Do it `times`, at random intervals of `every_s` in the mean, and note each in the run's journal."""
    from elastic_train.cluster.actor_names import run_key
    from elastic_train.cluster.faults import on_demand
    from elastic_train.cluster.run_reading import Following
    from elastic_train.storage.fsspec_store import open_store
    from elastic_train.storage.lease import Lease
    from elastic_train.storage.run_requests import note_fault

    kind = next((known for known in on_demand.ACTIONS if known == action), None)
    if kind is None:
        raise ConfigError(field="ACTION", problem=f"{action!r} is none of {', '.join(on_demand.ACTIONS)}.")
    store = open_store(run)
    reading = Following(store)
    reading.look()
    tenure = Lease(store, holder="", lease_s=1.0).look()
    if tenure is None or reading.told.last is None:
        raise StorageNotFound(path=run, operation="read", problem="there is no run with a journal here.")
    storage, _, name = store.url.rstrip("/").rpartition("/")
    key = _join(address, name, run_key(storage, name))
    if not yes and not on_demand.is_local():
        raise ConfigError(
            field="chaos",
            problem="the cluster has machines other than this one.",
            remedy="Say --yes if they are yours to break.",
        )
    draw = random.Random(seed)
    for number in range(times):
        if number:
            threading.Event().wait(draw.expovariate(1.0 / every_s))
            reading.look()
        group = reading.told.timeline.group
        if group is None:
            raise ConfigError(field="RUN", problem=f"nothing trains in {run} now.")
        whom = on_demand.target(group, kind, draw, worker=worker, rank=rank, node=node)
        note_fault(
            store,
            tenure.term,
            f"{kind} {whom}",
            nodes=(whom.node,),
            workers=(whom.worker,) if whom.worker else (),
        )
        say_line(on_demand.perform(kind, whom, key, group.generation, seconds=seconds))


def _join(address: str | None, name: str, guess: str) -> str:
    """Connect to the run's cluster, without an address to one on this machine that has it. The run's key."""
    from elastic_train.cluster.actor_names import NAMESPACE
    from elastic_train.cluster.faults import on_demand
    from elastic_train.cluster.ray_calls import connect, disconnect
    from elastic_train.cluster.ray_private import local_clusters

    candidates = [address] if address else [*local_clusters()] or [AUTO]
    for number, candidate in enumerate(candidates, 1):
        try:
            connect(candidate, namespace=NAMESPACE, logging_level=logging.WARNING)
            return on_demand.key_of(name, guess)
        except ConfigError:
            if number == len(candidates):
                raise
            disconnect()
    raise AssertionError
