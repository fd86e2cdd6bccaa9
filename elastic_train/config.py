"""What a person configures, validated once, here; afterwards trusted.

Frozen values of the standard library only; api.py translates Ray Train's config objects into a `RunSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_train.axes import MODEL
from elastic_train.clouds import CLOUDS
from elastic_train.errors import ConfigError
from elastic_train.option_checks import at_least, positive, seconds, typed

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Prints = Literal["none", "first", "all"]
"""Of whom a driver shows what the job prints while a run goes on: of nobody, of rank 0, or of every rank."""
Placement = Literal["PACK", "SPREAD", "STRICT_SPREAD"]
SLOWEST = 1.5
"""Times the median of its peers' steps from which a rank counts as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The training problem's batch: part of the problem, never of the plan.

    `global_size` samples per optimizer step in micro-batches of `micro_size`; every random choice and the
    sample order derive from `seed`. An epoch's last batch may be partial: it is trained with its true weight,
    or dropped with `drop_last`.

    `workers` processes on each rank load samples and make micro-batches of them, `prefetch` of these ahead of
    training. They change nothing but the time that it takes, and may differ when a run is resumed.
    """

    global_size: int
    micro_size: int
    seed: int = 0
    drop_last: bool = False
    shuffle: bool = True
    workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        typed(self, "batch.")
        positive("batch.global_size", self.global_size)
        for name in ("workers", "prefetch"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(field=f"batch.{name}", problem=f"must be 0 or more, got {value}.")
        positive("batch.micro_size", self.micro_size)
        if self.micro_size > self.global_size:
            raise ConfigError(
                field="batch.micro_size",
                problem=f"{self.micro_size} exceeds batch.global_size {self.global_size}.",
                remedy="Lower micro_size or raise global_size.",
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a whole batch."""
        return -(-self.global_size // self.micro_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written and how many stay.

    `every` is a number of steps, "epoch" for those of one, or "auto": Young's interval from the measured cost
    of a save and the failure rate. `peers` is the same for the memory of other nodes, where a snapshot costs
    little: every so many steps, as often as it costs 2 % at most, or None for no snapshots there. On a node
    they take `peer_bytes` at the most, None: what is free. `pressure` says what happens to a checkpoint that
    is due while the last one is still being written: training waits, or leaves it out, or takes it as soon as
    that is done. `bandwidth` is how many bytes a second each node writes to storage at most, None for as many
    as it can. `keep` newest stay, and with `best` the metric's name also the best `keep_best`.
    """

    every: int | Literal["auto", "epoch"] = "auto"
    peers: int | Literal["auto"] | None = "auto"
    peer_bytes: int | None = None
    pressure: Literal["wait", "skip", "coalesce"] = "coalesce"
    bandwidth: float | None = None
    keep: int = 3
    best: str | None = None
    best_order: Literal["min", "max"] = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        typed(self, "checkpoints.")
        for name in ("every", "peers", "peer_bytes", "bandwidth", "keep_best"):
            if not isinstance(value := getattr(self, name), str | None):
                positive(f"checkpoints.{name}", value)
        if self.keep < 1:
            raise ConfigError(
                field="checkpoints.keep",
                problem=f"must be at least 1, got {self.keep}: with 0 nothing would be left to resume from.",
            )
        if self.best is None and (self.keep_best, self.best_order) != (1, "min"):
            raise ConfigError(
                field="checkpoints.best",
                problem="keep_best and best_order have no effect without it.",
                remedy="Name the metric: Checkpoints(best='accuracy', ...).",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryLogs:
    """What each worker keeps of what its pipeline stage sends, so that a lost stage alone can be replayed.

    `memory_bytes` of host memory, then `disk_bytes` of a file in `directory` (None: the system's temporary
    one). `waiting_bytes` may be sent and not copied yet. Beyond that the oldest steps are given up: training
    never waits. Plans without stages keep nothing.

    With `budget_bytes` only so many are logged between two checkpoints, by all workers: some adjacent stages
    then log nothing between them and are replayed together, whichever of them is lost.

    At most `replayers` workers share the micro-batches of a lost stage, None: all that are idle meanwhile.
    With 1, or as many as the stage had, it comes back equal to the bit, with more within rounding.
    """

    memory_bytes: int = 512 << 20
    disk_bytes: int = 4 << 30
    waiting_bytes: int = 256 << 20
    directory: str | None = None
    budget_bytes: int | None = None
    replayers: int | None = None

    def __post_init__(self) -> None:
        typed(self, "boundary_logs.")
        if self.replayers is not None:
            positive("boundary_logs.replayers", self.replayers)
        for name in ("memory_bytes", "waiting_bytes"):
            positive(f"boundary_logs.{name}", getattr(self, name))
        for name in ("disk_bytes", "budget_bytes"):
            at_least(0, f"boundary_logs.{name}", getattr(self, name) or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFrom:
    """A checkpoint of another run or system that a new run begins with, read where it lies or copied. The
    `specification` maps names and layouts (docs/language.md), as TOML or Python values; "": they are alike.
    `names` are the optimizer's parameters in its order, where a file only has numbers for them.
    """

    url: str
    specification: str | Mapping[str, Any] = ""
    copy: bool = False
    allow_roots: tuple[str, ...] = ()  # directories outside of it whose files it may name
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        typed(self, "resume_from.")
        if not self.url:
            raise ConfigError(field="resume_from.url", problem="is empty.", remedy="Name a checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Constraints on the plan; None leaves an axis to the planner."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None  # None: 1, as nothing but a person's request divides the sequence
    ep: int | None = None  # None: 1

    @property
    def divides_the_model(self) -> bool:
        """Whether a person asks for an axis that cuts computations, not only batches and memory."""
        return any((getattr(self, axis) or 1) > 1 for axis in MODEL)

    @property
    def together(self) -> int:
        """Workers that are asked to compute each micro-batch together. Stages are none of them: a pipeline
        needs as many micro-batches as it has stages.
        """
        return (self.tp or 1) * (self.cp or 1)

    def __post_init__(self) -> None:
        typed(self, "parallelism.")
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None:
                positive(f"parallelism.{name}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Deadlines of the run, in seconds. Defaults suit a LAN; tests shorten them."""

    heartbeat_s: float = 1.0
    liveness_s: float = 8.0  # silence of heartbeats after which a worker is lost
    verdict_s: float = 1.0  # after a suspicion, how long a living worker may take to answer a ping
    settle_s: float = 30.0  # after an abort, how long a living worker may take to end its step
    form_s: float = 120.0  # forming a group: rendezvous, build, transfer
    stall_s: float = 30.0  # a phase of a step may take this long, or 20 step times if that is longer
    progress_s: float = 600.0  # no progress at all for this long is a hang
    lease_s: float = 10.0
    join_window_s: float = 5.0
    start_worker_s: float = 180.0
    wait_for_capacity_s: float = 600.0
    storage_trouble_s: float = 900.0  # storage may fail a run that cannot go on, or end, without it
    user_code_s: float = 3600.0  # the job's own code may hold up a group that forms: its data set, its model

    def __post_init__(self) -> None:
        typed(self, "timing.")
        for name in self.__slots__:
            seconds(f"timing.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """Whose notices of a machine's end to watch for. `endpoint` is another metadata service than its own."""

    cloud: str
    endpoint: str | None = None
    every_s: float = 2.0

    def __post_init__(self) -> None:
        typed(self, "notices.")
        if self.cloud not in CLOUDS:
            known = ", ".join(map(repr, CLOUDS))
            raise ConfigError(field="notices.cloud", problem=f"{self.cloud!r} is none of {known}.")
        seconds("notices.every_s", self.every_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Which machines a run asks for, keeps ready, and leaves.

    `standby` workers are kept ready beyond the largest group. `ask_autoscaler` for nodes that the run could
    use; others' requests for the cluster end then. A node `evict_slower_than` so many times its peers' steps
    is left, None: none is. `notices` names the cloud whose spot notices are heeded.
    """

    standby: int = 1
    ask_autoscaler: bool = True
    evict_slower_than: float | None = None
    notices: Notices | None = None

    def __post_init__(self) -> None:
        typed(self, "machines.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """By what `precision="fp16"` multiplies losses, as torch.amp.GradScaler: `init` at first, times `backoff`
    after a step with a gradient that is not finite, times `growth` after `interval` finite ones in a row."""

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        typed(self, "loss_scale.")
        for name in ("init", "interval"):
            positive(f"loss_scale.{name}", getattr(self, name))
        if not 0 < self.backoff < 1 <= self.growth:
            raise ConfigError(field="loss_scale", problem="backoff must be below 1 and growth not.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run puts up with before it ends.

    `failures` of machines without progress between them; None: what `FailureConfig(max_failures=...)` says,
    or 3, because its 0 can't be told from one that nobody set. `not_finite` steps in a row whose loss or
    gradient is not a number: each is skipped, and that many end the run as an error of the job.

    Without a checkpoint in between, `unsaved` of them that could not be written, or `unsaved_s` seconds since
    the first of them, end the run; None: it trains on and says so.
    """

    failures: int | None = None
    not_finite: int = 20
    unsaved: int | None = None
    unsaved_s: float | None = None

    def __post_init__(self) -> None:
        typed(self, "limits.")
        at_least(0, "limits.failures", self.failures or 0)
        positive("limits.not_finite", self.not_finite)
        for name, check in (("unsaved", positive), ("unsaved_s", seconds)):
            if (value := getattr(self, name)) is not None:
                check(f"limits.{name}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Everything a run is, apart from the user's own code.

    With `optimizer_in_backward` each parameter is updated as soon as its reduced gradient is there, which
    overlaps the update with the backward. It needs an optimizer that can be undone, and no clipping.
    """

    name: str
    storage_path: str
    batch: Batch
    max_steps: int
    min_workers: int
    max_workers: int
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    accelerator: str | None = None  # the kind that nodes must have, in Ray's words
    labels: tuple[tuple[str, str], ...] = ()  # selectors of the nodes that may be used, in Ray's words
    placement: Placement = "PACK"  # fill nodes, or spread workers over them, or one on each at most
    worker_environment: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Ray's runtime_env
    clip_norm: float | None = None
    optimizer_in_backward: bool = False
    precision: Precision = "fp32"
    loss_scale: LossScale | None = None  # of fp16; None: as GradScaler's own
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    max_failures: int = 3
    max_preemptions: int | None = None  # interruptions by machines that were taken away; None: any number
    max_restarts: int = 10  # of the controller without a committed step between them
    not_finite: int = 20  # steps in a row without a finite loss and gradient that end the run
    unsaved: int | None = None  # checkpoints in a row that could not be written, which end the run
    unsaved_s: float | None = None  # seconds of the same
    standby: int = 1
    timing: Timing = field(default_factory=Timing)
    notices: Notices | None = None
    ask_autoscaler: bool = True  # for nodes that the run could use; others' requests for the cluster end then
    on_event: str | None = None  # a URL or a command that is told what happens
    compare_replicas: int | Literal["auto"] | None = "auto"  # every so many steps; auto: 0.5 % of the time
    evict_slower_than: float | None = None  # times its peers' steps from which a node is left
    boundary_logs: BoundaryLogs | None = field(default_factory=BoundaryLogs)  # None: no stage is replayed

    def __post_init__(self) -> None:
        typed(self, "")
        plain = self.name.isprintable() and self.name.strip() == self.name
        if not plain or "/" in self.name or self.name in ("", ".", ".."):
            raise ConfigError(
                field="run_config.name",
                problem=f"{self.name!r} is not a usable run name.",
                remedy="It becomes a directory below storage_path.",
            )
        if not self.storage_path:
            raise ConfigError(field="run_config.storage_path", problem="is empty.")
        positive("max_steps", self.max_steps)
        positive("not_finite", self.not_finite)
        positive("scaling_config.num_workers", self.min_workers)
        if self.max_workers < self.min_workers:
            raise ConfigError(
                field="scaling_config.num_workers",
                problem=f"the maximum {self.max_workers} is below the minimum {self.min_workers}.",
            )
        if self.clip_norm is not None:
            positive("clip_norm", self.clip_norm)
            if self.optimizer_in_backward:
                raise ConfigError(
                    field="optimizer_in_backward",
                    problem="clipping needs the norm of the whole gradient before the first update.",
                    remedy="Set clip_norm=None, or leave optimizer_in_backward off.",
                )
        if self.optimizer_in_backward and self.precision == "fp16":
            raise ConfigError(
                field="optimizer_in_backward",
                problem="in fp16 a step is skipped where any gradient overflowed.",
                remedy="Leave optimizer_in_backward off, or compute in bf16.",
            )
        if self.loss_scale is not None and self.precision != "fp16":
            raise ConfigError(field="loss_scale", problem=f"has no effect with precision={self.precision!r}.")
        self._check_data_ranks()
        at_least(0, "failure_config.max_failures", self.max_failures)
        if isinstance(self.compare_replicas, int):
            positive("compare_replicas", self.compare_replicas)
        if self.evict_slower_than is not None and self.evict_slower_than < SLOWEST:
            raise ConfigError(
                field="machines.evict_slower_than",
                problem=f"{self.evict_slower_than} is less than {SLOWEST}, from where a rank counts as slow.",
            )
        at_least(0, "machines.standby", self.standby)
        if self.on_event == "":
            raise ConfigError(field="on_event", problem="is empty.", remedy="Give a URL, a command, or None.")

    def _check_data_ranks(self) -> None:
        """ConfigError where a batch has fewer micro-batches than there are ranks to share them out to."""
        together, batch = self.parallelism.together, self.batch
        ranks = -(-self.min_workers // together)
        if batch.micro_batches >= ranks:
            return
        who = f"{self.min_workers} workers"
        if together > 1:
            who = f"{ranks} groups of {together} that {who} form"
        raise ConfigError(
            field="batch",
            problem=(
                f"{batch.global_size} samples in micro-batches of {batch.micro_size} are "
                f"{batch.micro_batches} micro-batches, fewer than the {who}."
            ),
            remedy="Lower micro_size, raise global_size, ask for fewer workers, or divide the model with "
            "parallelism.tp.",
        )
