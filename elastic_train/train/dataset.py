"""A member's data set, built on first use and kept: it is the same in every generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_train.config import RunSpec
from elastic_train.data.identity import DataIdentity, identify
from elastic_train.data.loader import Loader
from elastic_train.data.numbered import numbered
from elastic_train.data.order import SampleOrder
from elastic_train.train.model import seeded_sections
from elastic_train.train.state import scalar_state as documents
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    order: SampleOrder
    loader: Loader
    identity: DataIdentity


def build(task: Task, spec: RunSpec, guard: UserCodeGuard) -> Data:
    seed = spec.batch.seed
    with guard.at("building the data set", 0):
        dataset = numbered(task.dataset())
        identity = identify(dataset, seed=seed, seeding=seeded_sections.sample)
        loader = Loader(dataset, seed=seed, seeding=seeded_sections.sample)
    return Data(order=SampleOrder(identity.length, spec.batch), loader=loader, identity=identity)


def described(shards: Shards, spec: RunSpec, identity: DataIdentity) -> dict[str, Any]:
    """The scalars of a state, and of the problem that it is a state of, as JSON values."""
    batch = ("global_size", "micro_size", "seed", "drop_last", "shuffle")
    return documents.describe(shards) | {
        "data": {"length": identity.length, "fingerprint": identity.fingerprint},
        "batch": {name: getattr(spec.batch, name) for name in batch},
        "precision": spec.precision,
    }
