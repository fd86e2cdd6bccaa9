"""The result of `fit`: Ray Train's Result with the run's own history."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
from ray import train

from elastic_train.cluster.run_reading import records
from elastic_train.errors import StorageNotFound
from elastic_train.observe.journal_records import Record
from elastic_train.observe.ledger import Ledger, ledger
from elastic_train.storage.artifacts import steps_of
from elastic_train.storage.fsspec_store import open_store


def _frame(result: Result) -> Any:
    """Ascending by step; NaN where a step has no such metric."""
    rows = [{"loss": entry.loss, **dict(entry.metrics)} for entry in result.ledger.kept]
    columns = {"step": pa.array([entry.step for entry in result.ledger.kept], pa.int64())}
    for name in dict.fromkeys(("loss", *(name for row in rows for name in row if name != "step"))):
        columns[name] = pa.array([row.get(name) for row in rows], pa.float64())
    return pa.table(columns).to_pandas()


@dataclass
class Result(train.Result):
    """A `ray.train.Result`. `best_checkpoints` are those that the run keeps, oldest first, with the metrics
    of their steps, and `filesystem` is the one that they and `path` are in. `ledger` has each step of the
    kept lineage, `records` the whole journal: those of a long run are read from its storage when they are
    asked for (StorageNotFound where it is gone by then). `metrics_dataframe` is made of them, a row for each
    step of the kept lineage: `step`, `loss` and the metrics that were reported of it.
    """

    metrics_dataframe: Any = field(default=cached_property(_frame), init=False, repr=False, compare=False)
    """A `pandas.DataFrame`; no part of what is shown or compared, as neither has to read storage."""
    outcome: str = "finished"
    summary: str = ""  # what happened to the run, as a table

    @cached_property
    def records(self) -> tuple[Record, ...]:
        assert self.path is not None
        found = tuple(records(open_store(self.path)))
        if not found:  # each run that ended has a journal
            raise StorageNotFound(
                path=self.path,
                operation="read",
                problem="the journal is not there any more. Ask for records before you delete the run.",
            )
        return found

    @cached_property
    def artifacts(self) -> dict[int, tuple[str, ...]]:
        """URLs of the files that a loop left in `ctx.artifacts`, by step."""
        assert self.path is not None
        found = steps_of(open_store(self.path))
        return {step: tuple(f"{self.path}/{path}" for path in paths) for step, paths in found.items()}

    @cached_property
    def ledger(self) -> Ledger:
        return ledger(self.records)
