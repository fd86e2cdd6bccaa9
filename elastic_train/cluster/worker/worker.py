"""The worker: owns one Member, runs it on a training thread, and reports for it.

Its public methods are called through an actor, on the threads that `worker_actor` names for them. Those for
control never wait for a step; what belongs to the training thread waits for its turn on it. A worker never
decides: it does what it is told and says what came of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import ray
from ray import cloudpickle

from elastic_train.cluster.byte_stream import Door, bring
from elastic_train.cluster.checkpoint_io import PartWriter, read_in_batches, read_in_turn
from elastic_train.cluster.faults.fault_injector import FaultInjector
from elastic_train.cluster.messages import Filled, Heartbeat, Offer, Ready
from elastic_train.cluster.outbox import ORPHAN_LEASES, Outbox
from elastic_train.cluster.stage_replays import StageReplay
from elastic_train.cluster.worker.capture_output import CapturedOutput
from elastic_train.cluster.worker.compute_time import Stopwatch
from elastic_train.cluster.worker.direct_tier import DirectTier
from elastic_train.cluster.worker.fill_shards import Given, check_complete, fill_from, reads, take
from elastic_train.cluster.worker.load_job import loading
from elastic_train.cluster.worker.prepare_rank import dismiss, points, prepare
from elastic_train.cluster.worker.process_end import LastWords, end_process
from elastic_train.cluster.worker.replay_stage import StepLog, complete, replay, step_log
from elastic_train.cluster.worker.restore_shards import restore
from elastic_train.cluster.worker.shared_memory_tier import SharedMemoryTier
from elastic_train.cluster.worker.spot_notices import heed
from elastic_train.cluster.worker.thread_stacks import stack_of
from elastic_train.cluster.worker.training_thread import TrainingThread
from elastic_train.cluster.worker.worker_device import device_of_worker
from elastic_train.cluster.worker.worker_reporter import WorkerReporter
from elastic_train.config import RunSpec
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.errors import GroupBroken as GroupIsBroken
from elastic_train.errors import UserCodeError
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Live, Stored
from elastic_train.storage.job_output import OutputWriter
from elastic_train.train.collectives.interruptible_group import waited
from elastic_train.train.member import Member
from elastic_train.train.rank_assignment import RankAssignment, ReplayAssignment
from elastic_train.train.reclaim import spare_what_exists
from elastic_train.train.snapshot.background_saver import BackgroundSaver
from elastic_train.train.snapshot.peer_tier import PeerTier

log = logging.getLogger(__name__)
T = TypeVar("T")
OUTPUT_S = 2.0  # how long the end of a run waits for what the job printed last


class Worker:
    """`job` is the pickled Task; `controller` the actor that is told everything."""

    def __init__(
        self,
        *,
        name: str,
        node: str,
        spec: RunSpec,
        job: bytes,
        controller: Any,
        faults: tuple[FaultSchedule, Mapping[str, str]] | None = None,
    ) -> None:
        heed(spec.notices)
        self._name, self._node, self._spec = name, node, spec
        self._generation = 0
        self._gone = 0  # the generation that was let go last
        self._finished = 0  # the generation that ran the last step here
        self._paused = 0  # the generation that stands at a boundary here
        self._later: Given | None = None  # what a late rank takes once the others compute
        self._stopwatch = Stopwatch(waited)
        self._reporter = WorkerReporter(worker=name, node=node, stopwatch=self._stopwatch)
        self._training = TrainingThread()
        self._outbox = Outbox(
            lambda words, beat: controller.deliver.remote(name, words, beat),
            self._reporter.heartbeat,
            heartbeat_s=spec.timing.heartbeat_s,
            grace_s=spec.timing.lease_s * ORPHAN_LEASES,
            expired=partial(end_process, name),
        )
        self._reporter.post = self._outbox.post
        self._last_words = LastWords(name, self._reporter, self._outbox)
        self._member: Member | None = None
        self._writer = PartWriter(spec, self._outbox.post, clock=time.monotonic)
        self._reporter.writing = self._writer.writing
        self._output = CapturedOutput(
            OutputWriter(self._writer.store, f"{name}.{os.getpid()}"), worker=name, rank=self._reporter.rank
        )
        direct, every = DirectTier(self._writer, log.warning), spec.checkpoints.peers
        self._shared_memory = (
            None
            if every is None
            else SharedMemoryTier(name, direct, every=every, note=log.warning, steps=self._reporter.repeat)
        )
        self._tier: PeerTier = self._shared_memory or direct
        self._injector: FaultInjector | None = None
        if faults is not None:
            self._injector = self._stopwatch.then = FaultInjector(
                faults[0],
                store=self._writer.store,
                node=node,
                labels=faults[1],
                rank=lambda: self._owner.progress().rank,
                break_group=lambda: self._owner.abort(self._owner.progress().generation),
            )
        self._started = self._training.submit(lambda: self._start(job))

    # -- being there

    def ready(self) -> Ready:
        self._started.result()
        return Ready(
            worker=self._name,
            node=self._node,
            pid=os.getpid(),
            address=ray.util.get_node_ip_address(),
        )

    def life(self) -> None:
        """Fails when this process ends, which the controller waits for."""
        threading.Event().wait()

    def ping(self) -> Heartbeat:
        return self._reporter.heartbeat()

    def stack(self) -> str:
        """Where the training thread is, for a person; it may hang in there."""
        return stack_of("training")

    # -- forming a group

    def offer(self, origin: Live) -> Offer:
        """Bring the local state that `origin` names to its step, and return its fragments and document."""

        def settle() -> Offer:
            undone = self._owner.roll(origin.generation, origin.step, origin.vote, origin.undo)
            return Offer(
                holds=self._owner.held.table(origin.generation),
                document=self._owner.document(origin.generation),
                undone=undone,
                steady=self._owner.steady,
                computed=self._owner.computed(origin.generation, origin.step),
            )

        return self._on_training(origin.generation, settle)

    def replay(
        self,
        stage_replay: StageReplay,
        assignment: ReplayAssignment,
        senders: Sequence[Any],
        peer_stores: Sequence[Any],
    ) -> None:
        """Bring a lost stage back with others, and keep this rank's part beside its own local state."""
        self._generation = stage_replay.during
        self._on_training(
            stage_replay.during,
            lambda: replay(self._owner, self._writer.open, stage_replay, assignment, senders, peer_stores),
        )

    def complete(self, stage_replay: StageReplay, number: int, helpers: Sequence[Any]) -> None:
        """Take what those that helped in a replay had logged of this rank's share."""
        self._on_training(stage_replay.during, lambda: complete(self._owner, stage_replay, number, helpers))

    def prepare(self, assignment: RankAssignment) -> None:
        """Make a rank of the next group ready, while another one trains. Whoever fails leaves nothing."""
        prepare(self._owner, self._training, assignment, points(self._injector, assignment))

    def dismiss(self, generation: int, number: int) -> None:
        """Forget what was made ready; number 0: whatever it is."""
        if self._member is not None:
            dismiss(self._member, self._training, generation, number)

    def join(self, assignment: RankAssignment, states: Fragments | None) -> Fragments:
        """Take a rank: rendezvous, mesh, model with empty shards. Returns what it then needs."""
        self._generation = assignment.generation

        def enter() -> Fragments:
            self._later = None
            reached = points(self._injector if assignment.prepared else None, assignment)
            reached("swapping")
            self._owner.join(assignment)
            reached("swapped")
            return self._owner.forming.needs(states)

        return self._on_training(assignment.generation, enter)

    def gather(
        self,
        generation: int,
        origin: Live,
        own: Fragments,
        others: Sequence[tuple[Any, Fragments]],
        document: dict[str, Any],
        *,
        rest: tuple[Stored, Fragments] | None = None,
        late: frozenset[int] = frozenset(),
        computed: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ) -> Filled:
        """Fill the new shards from the own local state, from the holders named, and the rest from storage.

        A rank that is `late` gets what others have while these compute the first step: here it takes what a
        forward may change, and with `go` everything else. Ranks go on with what they have `computed` of that
        step.
        """

        def fill() -> Filled:
            member, given = self._owner, Given(origin=origin, own=own, others=others)
            member.continued = origin.generation
            if rest is not None:
                return self._from_storage_too(given, rest, document)
            shards = member.forming.shards
            shards.late, shards.computed = late, computed
            if shards.rank in late:
                shards.proved = False
                given, self._later = given.split("buffer")
            take(member, given)
            notes = member.load(dict(document))
            if self._later is None:
                check_complete(member, origin.step)
            return Filled(digest=None, step=document["step"], notes=tuple(notes))

        return self._timed(generation, fill)

    def kept(self, stored: Stored) -> Offer:
        """What a committed checkpoint holds: a holder like any other."""
        checkpoint = self._writer.open(stored)
        return Offer(holds=checkpoint.whole(), document=dict(checkpoint.document))

    def restore(self, generation: int, stored: Stored) -> Filled:
        """Fill the new shards from a committed checkpoint, reading only the bytes this rank needs."""

        def fill() -> Filled:
            checkpoint = self._writer.open(stored)
            return restore(self._owner, checkpoint)

        return self._timed(generation, fill)

    def initialise(self, generation: int) -> Filled:
        """Fill the new shards from the seed."""

        def fill() -> Filled:
            notes = self._owner.forming.initialise()
            digest, by_module = self._owner.forming.digest(), self._owner.forming.shards.by_module
            return Filled(digest=digest, step=0, notes=notes, by_module=by_module)

        return self._timed(generation, fill)

    def go(self, generation: int, peer_store: Any = None) -> None:
        """Train, with this node's peer store. Returns at once; how it ends is posted."""
        if self._shared_memory is not None:
            self._shared_memory.meet(peer_store)
        self._training.submit(lambda: self._run(generation))

    def read(self, generation: int, step: int, wanted: Fragments) -> list[np.ndarray]:
        return self._owner.held.read(generation, step, wanted)

    def bring(self, generation: int, step: int, wanted: Fragments, door: Door) -> None:
        """Send the bytes of boxes of a local state to who waits for them."""
        bring(read_in_turn(self._owner.held.read, generation, step, wanted), door, generation=generation)

    def digest_of(self, generation: int, step: int, boxes: Fragments) -> int:
        """Digest of boxes of a local state, so that what was moved can be compared with what was there."""
        return self._owner.held.digest_of(generation, step, boxes)

    def sent(
        self, generation: int, stages: tuple[int, int], step: int, share: Collection[int] | None = None
    ) -> StepLog:
        """What was kept in a step of what this worker sent to a range of stages, for their replay."""
        return step_log(self._owner, generation, stages, step, share)

    # -- steering a running group

    def request(self, generation: int, *, pause: bool = False, save: bool = False) -> None:
        if generation != self._generation or self._member is None:
            return
        self._member.request(pause=pause, save=save)
        stands = generation == self._paused and not pause
        if save and (generation == self._finished or stands):  # its last checkpoint is tried again
            self._training.submit(lambda: self._save_again(generation))

    def forget(self, generation: int, step: int) -> None:
        """What was logged up to a step is needed no more."""
        if self._member is not None:
            self._member.held.forget(generation, step)

    def repeat(self) -> tuple[StepCommitted, ...]:
        """The last steps, for a controller that may have died before they were durable."""
        return self._reporter.repeat()

    def abort(self, generation: int) -> None:
        """Break the generation's collectives; the final report follows from the training thread."""
        if self._member is not None:
            self._member.abort(generation)
        self._training.submit(lambda: self._reporter.final_report(generation, again=True))

    # -- on the training thread

    def _start(self, job: bytes) -> None:
        with loading(self._name, self._node):
            self._member = self._reporter.member = Member(
                cloudpickle.loads(job),  # pyright: ignore[reportPrivateImportUsage]
                self._spec,
                device=device_of_worker(self._spec.gpus_per_worker),
                on_step=self._reporter.step,
                saving=lambda described: BackgroundSaver(described, self._tier, log.warning),
                faults=self._stopwatch,
                dumps=cloudpickle.dumps,  # pyright: ignore[reportPrivateImportUsage]
            )
        self._training.submit(self._member.drawn_ahead.draw)
        spare_what_exists()

    @property
    def _owner(self) -> Member:
        self._started.result()
        assert self._member is not None
        return self._member

    def _from_storage_too(
        self, given: Given, rest: tuple[Stored, Fragments], document: Mapping[str, Any]
    ) -> Filled:
        """Exact parts of one step, some of them of a checkpoint: their digest is compared as a whole."""
        member, (stored, lacking) = self._owner, rest
        asked = [(reads(handle, given.origin, member.check), boxes) for handle, boxes in given.others]
        fill_from(member, given.origin, given.own, asked)
        for boxes, arrays in read_in_batches(self._writer.open(stored), lacking):
            member.forming.fill(boxes, arrays)
        notes = member.load(dict(document))
        return Filled(digest=member.forming.digest(), step=document["step"], notes=tuple(notes))

    def _take_the_rest(self) -> None:
        """What a late rank lacks, while others compute the first step, whose vote waits for it."""
        later, self._later = self._later, None
        if later is not None:
            self._owner.filling(late=True)
            take(self._owner, later, proved=False)
            check_complete(self._owner, later.origin.step)

    def _run(self, generation: int) -> None:
        if generation != self._generation or self._reporter.settled(generation) or generation == self._gone:
            return
        self._gone = generation
        try:
            self._take_the_rest()
            self._owner.go()
            before = self._owner.held.current.step
            end = self._owner.run()
        except GroupIsBroken as error:
            self._reporter.broke(generation, error)
            self._training.submit(self._owner.drawn_ahead.draw)
        except UserCodeError as error:
            self._output.flush(OUTPUT_S)  # the run ends with it, and so does this process
            self._reporter.broke(generation, error)
        except Exception as error:  # noqa: BLE001 - an engine fault: said, never swallowed
            self._reporter.broke(generation, self._last_words.of(generation, error))
        else:
            if end.kind == "paused":
                self._paused = generation
                self._reporter.final_report(generation)
                self._training.submit(self._owner.drawn_ahead.draw)
            else:
                self._finished = generation
                self._output.flush(OUTPUT_S)
                if end.step == before:  # nothing was left to run but the end, and nothing saved yet
                    self._save_again(generation)

    def _save_again(self, generation: int) -> None:
        over = self._reporter.settled(generation) and generation != self._paused
        if generation == self._generation and not over and self._owner.requests.save:
            self._owner.requests.save = False
            self._owner.save()

    def _timed(self, generation: int, fill: Callable[[], Filled]) -> Filled:
        began = time.monotonic()
        filled = self._on_training(generation, fill)
        return replace(filled, seconds=time.monotonic() - began)

    def _on_training(self, generation: int, call: Callable[[], T]) -> T:
        """Run a call on the training thread; a failure there is this generation's failure too."""
        future = self._training.submit(call)
        try:
            return future.result()
        except Exception as error:
            self._reporter.failed(generation, self._last_words.of(generation, error))
            raise
