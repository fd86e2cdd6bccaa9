"""What `fit` returns: Ray Train's Result, and the run's own history beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray import train

from elastic_train.observe.ledger import Ledger
from elastic_train.observe.records import Record


@dataclass
class Result(train.Result):
    """A `ray.train.Result`. `ledger` has each step of the kept lineage, `records` the whole journal."""

    outcome: str = "finished"
    ledger: Ledger = field(default_factory=Ledger)
    records: tuple[Record, ...] = ()
    summary: str = ""  # what happened to the run, as a table
