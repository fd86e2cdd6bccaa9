"""One worker's part of training across generations: it joins groups, fills shards, runs steps, serves state.

`progress`, `abort`, `request` and `read` may be called from any thread, everything else belongs to the
training thread. The local state of the generation before is kept until `go` makes the new shards the state.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic_train.checkpoint.merging import merged
from elastic_train.config import RunSpec
from elastic_train.errors import StateMismatch
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Vote
from elastic_train.train.assemble import assemble
from elastic_train.train.boundary.crossing import KeptCrossings
from elastic_train.train.custom.loop_runner import UsersLoop
from elastic_train.train.dataset import Data, Dumps, build, check_at_start, described
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.device_errors import begin_peak
from elastic_train.train.drawn_ahead import DrawnAhead
from elastic_train.train.group_membership import Faults, GroupMembership
from elastic_train.train.next_group import NextGroup, group_of
from elastic_train.train.rank_assignment import RankAssignment, ReplayAssignment, WorkerProgress
from elastic_train.train.reclaim import reclaim
from elastic_train.train.replay.stage_replay import replay
from elastic_train.train.replay.substituted_ranks import opened_substitute, replaying_group, substituted_ranks
from elastic_train.train.snapshot.saver import Described, Saver
from elastic_train.train.state.carried_logs import close_logs, follow, rolled
from elastic_train.train.state.local_states import LocalStates
from elastic_train.train.state.shards import Shards
from elastic_train.train.state.unfilled_shards import UnfilledShards
from elastic_train.train.step.gradients import edits
from elastic_train.train.step.roll_forward import roll
from elastic_train.train.step.training_loop import Loop, Requests, RunEnd, StepReport
from elastic_train.train.step.warm_up import warm_up
from elastic_train.train.step.workload import GroupContext, Workload
from elastic_train.train.task import Task, check_task


class Member:
    """`on_step` hears of each committed step at once, and again with metrics if it was evaluated.

    It must not block. `saving` makes what takes snapshots. `faults` is called at (phase, step, micro-batch).
    `dumps` pickles the data set for loader processes.
    """

    def __init__(
        self,
        task: Task,
        spec: RunSpec,
        *,
        device: str = "cpu",
        on_step: Callable[[StepReport], None],
        saving: Callable[[Described], Saver] | None = None,
        faults: Faults | None = None,
        dumps: Dumps = pickle.dumps,
    ) -> None:
        check_task(task)
        if edits(task):  # a stage that is replayed alone lacks the gradients of the others
            spec = replace(spec, boundary_logs=None)
        self._task, self._spec, self._device = task, spec, torch.device(device)
        self._on_step, self._dumps = on_step, dumps
        self._saver = saving(self._described) if saving is not None else None
        self.held = LocalStates()
        self._entry = GroupMembership(faults)
        self._ahead = NextGroup()
        self.drawn_ahead = DrawnAhead(task, spec)
        self._built: tuple[int, int] | None = None  # the meeting for which a rank was taken ahead
        self._mesh: DeviceMesh | None = None
        self._next: UnfilledShards | None = None
        self._late = False  # whether others train already while this one's shards are filled
        self.requests = Requests()
        self.continued: int | None = None  # the generation whose local state the forming group goes on from
        self._data: Data | None = None

    # -- any thread ----------------------------------------------------------------------------------------

    def progress(self) -> WorkerProgress:
        incoming = self._next
        progress = self._entry.progress()
        if incoming is None:
            return progress
        return replace(progress, filled_bytes=incoming.filled_bytes, needed_bytes=incoming.needed_bytes)

    def abort(self, generation: int) -> None:
        """Break a generation's collectives, running or to come. Idempotent; others are untouched."""
        self._entry.abort(generation)
        if generation >= self._entry.progress().generation:
            self._ahead.forget()  # what was made ready beside it is of no use any more

    @property
    def holds_nothing(self) -> bool:
        """Whether this member has no part in any group, and never had."""
        return not self.held.every()

    def connect_ahead(self, assignment: RankAssignment, reached: Callable[[str], None]) -> None:
        """Connect to the group of an assignment beside the one that this member is in, for `join`."""
        self._ahead.connect(assignment, str(self._device), self._spec.timing.form_s, reached)

    def dismiss(self, generation: int, number: int) -> None:
        """Break what was made ready; what was built of it is left by `leave_built`. Number 0: any."""
        self._ahead.forget(generation, number)
        built = self._built
        if built is not None and (not number or built == (generation, number)):
            self._entry.break_off()

    def request(self, pause: bool = False, save: bool = False) -> None:
        """Ask for a pause or a checkpoint; it enters the next vote, so all ranks do it at the same step."""
        self.requests.pause |= pause
        self.requests.save |= save

    def check(self) -> None:
        """Raise GroupBroken if what this member is in was broken."""
        self._entry.check()

    # -- local states --------------------------------------------------------------------------------------

    def document(self, generation: int) -> dict[str, Any]:
        """The scalars of a local state, as JSON values."""
        with self.held.beside_training():
            found = [self._described(held) for held in self.held.of(generation)]
        return found[0] if len(found) == 1 else merged(found)

    def computed(self, generation: int, step: int) -> tuple[int, ...]:
        """The micro-batches of the step after `step` whose gradients a local state at it comes with."""
        kept = self.held.kept(generation, step + 1)
        return kept.micro_batches if kept is not None else ()

    def roll(self, generation: int, step: int, vote: Vote | None, undo: bool = False) -> frozenset[str]:
        """Bring a local state to `step`, as far as it gets there: forward with `vote`, or back by an undo.

        Returns the parameters that are there only up to the rounding of one.
        """
        held = self.held.of(generation)
        try:
            for shards in held:
                with rolled(shards):
                    roll(shards, step, vote, self._spec, undo=undo)
        finally:
            self.held.moved()
        return frozenset(name for shards in held for name in shards.undone)

    # -- forming -------------------------------------------------------------------------------------------

    def join(self, assignment: RankAssignment) -> None:
        """Take a rank: process group, mesh, and a model with shards that have memory and no values yet."""
        if self._built == assignment.meeting:  # ahead
            self._built = None
            self._entry.check()
            rank, step = assignment.rank, assignment.step + 1
            self._entry.mark(assignment.generation, rank, "forming", step, -1)
        else:
            self._leave()
            self.requests = Requests()
            if not assignment.prepared:
                self._ahead.forget()
            self._enter(assignment)
        if self._next is None:
            self._build(assignment)

    def build_ahead(self, assignment: RankAssignment, reached: Callable[[str], None]) -> None:
        """Take a rank in the group that `connect_ahead` connected, while others train in another one: the
        data set is built, a micro-batch run, and the model built. Only for a member that holds nothing.

        Under plans that cut tensors, shards are built by all ranks together: that is left for `join`.
        """
        self._leave()
        self.requests = Requests()
        self._built = assignment.meeting
        self._enter(assignment, reached)
        whole = assignment.plan.mesh.dp_replicate == assignment.plan.world_size
        if not isinstance(self._task, LoopTask):  # which declares its data once it is built
            self._dataset()
            reached("data")
            if whole:
                self._warm_up(assignment)
        reached("warmed up")
        if whole:
            self._build(assignment)
        reached("built")

    def leave_built(self, generation: int, number: int) -> None:
        """Leave what was built ahead and is not wanted any more. Number 0: whatever it is."""
        if self._built is not None and (not number or self._built == (generation, number)):
            self._leave()
            self._entry.mark(0, -1, "idle", 0, -1, fault=False)

    def substitute(self, assignment: ReplayAssignment) -> None:
        """Take the place of lost ranks, with others or alone: memory without values yet.

        It is then filled and loaded as a rank's shards are. Breaking the generation that forms ends it.
        """
        self._leave()
        plan = assignment.substitute.plan
        group = replaying_group(assignment, str(self._device), self._spec.timing.form_s)
        self._entry.enter(group, plan, assignment.rank, 0)
        mesh = None
        if group.world_size > 1:
            group.form()
            mesh = group.mesh(assignment.substitute.mesh)
        self._next = self._assembled(assignment.generation, assignment.rank, plan, mesh)
        self.forming.shards.by_module = assignment.by_module
        self.forming.shards.substituted = substituted_ranks(assignment, self._task, self._spec)

    def replay(self, through: int, kept: KeptCrossings) -> None:
        """Run the steps of what was filled up to `through`; it is then held as the lost ranks' shards were.

        KeyError where `kept` lacks something.
        """
        shards, generation = self.forming.shards, self._entry.group.generation
        shards.log = opened_substitute(shards, self._spec)
        context = self._context(generation, shards.rank, phase="replay")
        replay(self._workload(), context, shards, kept, through)
        shards.settle()
        shards.absent = shards.hidden
        self.held.add(shards)
        self._leave()

    def fill_local(self, generation: int, boxes: Fragments) -> None:
        """Keep boxes of an own local state where they are, or copy them: StateMismatch if a copy differs."""
        step = self.held.step_of(generation)
        left = self.forming.adopt(boxes, self.held.serving(generation, step))
        self.forming.fill(left, self.held.read(generation, step, left))
        if self.forming.digest_of(left) != self.held.digest_of(generation, step, left):
            raise StateMismatch(step=step, detail="what was copied from this rank's own memory differs")

    @property
    def steady(self) -> bool:
        """Whether parameters and the optimizer's state stay as they are from a step's begin to its vote."""
        return not isinstance(self._task, LoopTask) and not self._spec.optimizer_in_backward

    def filling(self, *, late: bool = False) -> None:
        """Bytes came. With `late` from now on it is a phase of the first step, in which others compute."""
        self._late |= late
        if self._late:
            shards = self.forming.shards
            self._entry.mark(shards.generation, shards.rank, "filling", (shards.step or 0) + 1, -1)

    def load(self, document: dict[str, Any]) -> list[str]:
        """Take a document's scalars, after `fill`; sentences about what differs from the code."""
        return self.forming.load(document, self._dataset().identity)

    def go(self) -> None:
        """The new shards become the state; earlier local states are dropped."""
        shards = self.forming.shards
        begin_peak(self._device)
        if own := shards.computed.get(shards.rank):
            assert self.continued is not None
            shards.kept = self.held.kept(self.continued, (shards.step or 0) + 1)
            assert shards.kept is not None, "what was offered is held until the next group goes"
            assert shards.kept.micro_batches == own
        shards.mark_made()
        shards.log = follow(shards, self.held.every(), self.continued, self._spec)
        shards.spare_memory = [memory for old in self.held.every() for memory in old.gradient_memory]
        self.held.replace(shards, continued=self.continued)
        self._next = None
        self._late = False
        reclaim()

    @property
    def forming(self) -> UnfilledShards:
        """The shards of the generation that forms; what fills them belongs to the training thread."""
        assert self._next is not None, "join comes first"
        return self._next

    # -- training ------------------------------------------------------------------------------------------

    def run(self) -> RunEnd:
        """Steps until the last one or a voted pause, once per generation; settled after it in any case."""
        shards = self.held.current
        if shards.step == 0:
            check_at_start(self._dataset(), self._task, self._spec, shards, self._entry.guard)
        if self._saver is not None:
            self._saver.start(shards)
        loop = (UsersLoop if isinstance(self._task, LoopTask) else Loop)(
            self._workload(),
            self._context(shards.generation, shards.rank),
            shards,
            on_step=self._on_step,
            saver=self._saver,
            requests=self.requests,
        )
        try:
            return loop.run()
        finally:
            if self._saver is not None:
                self._saver.end()
            shards.settle()
            self.held.moved()
            self._entry.mark(shards.generation, shards.rank, "settled", shards.step or 0, -1, fault=False)

    def save(self) -> None:
        """Save the state that is held once more, where nothing runs."""
        shards = self.held.current
        assert self._saver is not None
        self._saver.start(shards)
        self._saver.take(shards, storage=True, wait=True)
        self._saver.end()

    def close(self) -> None:
        """Leave the group and drop everything."""
        self._ahead.forget()
        self._leave()
        close_logs(self.held.every())
        self.held.replace(None)
        if self._data is not None:
            self._data.loader.close()

    # -- private -------------------------------------------------------------------------------------------

    def _enter(self, assignment: RankAssignment, reached: Callable[[str], None] | None = None) -> None:
        """Be in the group of an assignment: what was connected ahead, or one that meets now."""
        plan, form_s = assignment.plan, self._spec.timing.form_s
        if assignment.prepared:
            group = self._ahead.take(assignment)
        else:
            group = group_of(assignment, str(self._device), form_s)
        ahead = reached is not None
        self._entry.enter(group, plan, assignment.rank, assignment.step + 1, ahead=ahead)
        if reached is not None:
            reached("entered")
        group.form()
        self._mesh = group.mesh(plan.mesh) if plan.world_size > 1 else None
        if reached is not None:
            reached("taken up")

    def _warm_up(self, assignment: RankAssignment) -> None:
        """Run a micro-batch on a model that is thrown away, before the memory of the real one is there."""
        generation, rank, plan = assignment.generation, assignment.rank, assignment.plan
        shards = self._assembled(generation, rank, plan, self._mesh).shards
        group, guard = self._entry.group, self._entry.guard
        context = GroupContext(group=group, guard=guard, mark=lambda *where: None)
        try:
            with group.answering():
                warm_up(self._workload(), context, shards, assignment.step + 1)
        except Exception:  # noqa: BLE001 - of a model without values: the first step judges
            group.check()
        del shards, context
        reclaim()

    def _build(self, assignment: RankAssignment) -> None:
        generation, rank = assignment.generation, assignment.rank
        self._next = self._assembled(generation, rank, assignment.plan, self._mesh)
        self.forming.shards.by_module = assignment.by_module

    def _assembled(self, generation: int, rank: int, plan: Plan, mesh: DeviceMesh | None) -> UnfilledShards:
        shards = assemble(
            self._task,
            self._spec,
            generation=generation,
            rank=rank,
            plan=plan,
            mesh=mesh,
            device=self._device,
            guard=self._entry.guard,
            drawn=self.drawn_ahead.take(),
        )
        return UnfilledShards(self._task, self._spec, shards, self._entry.guard)

    def _workload(self) -> Workload:
        data = self._dataset()
        return Workload(task=self._task, spec=self._spec, order=data.order, loader=data.loader)

    def _context(self, generation: int, rank: int, phase: str | None = None) -> GroupContext:
        """Of the group that was entered; its marks say `phase` where there is one."""

        def mark(of_step: str, step: int, micro_batch: int) -> None:
            self._entry.mark(generation, rank, phase or of_step, step, micro_batch)

        return GroupContext(group=self._entry.group, guard=self._entry.guard, mark=mark)

    def _leave(self) -> None:
        abandoned, self._next = self._next is not None, None
        self._mesh = None
        self._late = False
        self._built = None
        self.continued = None
        self._entry.leave()
        if abandoned:
            reclaim()

    def _described(self, shards: Shards) -> dict[str, Any]:
        return described(shards, self._spec, self._dataset().identity)

    def _dataset(self) -> Data:
        if self._data is None:
            self._data = build(self._task, self._spec, self._entry.guard, self._dumps)
        return self._data
