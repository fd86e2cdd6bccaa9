"""A simulated cluster: performs commands with delays, and ends every effect in an event, as the real one
does.

Words of a worker arrive in order, late, sometimes twice, and not at all if it dies first; while no controller
is there they wait. Commands of an older term are refused, except by storage, which has its own fence.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_train.control.causes import CauseKind
from elastic_train.control.commands import (
    Abort,
    AskPeers,
    Command,
    Commit,
    Dismiss,
    End,
    Forget,
    Form,
    Go,
    Pause,
    Prepare,
    Prune,
    ReadLog,
    Save,
    StartWorker,
    StopWorker,
)
from elastic_train.control.events import (
    Cause,
    CheckpointRejected,
    FinalReport,
    GroupBroken,
    GroupReady,
    LacksRoom,
    PeersReported,
    WorkerLost,
    WorkerReady,
)
from elastic_train.control.fault_schedule import At
from elastic_train.control.policy import Policy
from elastic_train.recovery.evidence import Live, Mixed, checkpoint_of
from elastic_train.testing import simulated_log
from elastic_train.testing.simulated_faults import Evaluate
from elastic_train.testing.simulated_group import (
    FILLED_AT,
    FILLING_AT,
    FOREVER,
    PHASE_AT,
    SimulatedGroup,
    SimulatedWorker,
    committed,
    roll_forward,
)
from elastic_train.testing.simulated_machines import SimulatedMachines
from elastic_train.testing.simulated_peers import SimulatedPeers
from elastic_train.testing.simulated_preparation import SimulatedPreparations
from elastic_train.testing.simulated_storage import SimulatedStorage
from elastic_train.testing.simulated_time import Clock

ROOM_S = 0.5
"""From one look for room to the next, for a process that waits for it."""


class SimulatedCluster(SimulatedMachines):
    """`moment` is called whenever the group reaches a phase of a step."""

    def __init__(self, clock: Clock, policy: Policy, *, step_s: float = 2.0, save_s: float = 1.5) -> None:
        super().__init__(clock)
        self.policy, self.step_s = policy, step_s
        self.storage = SimulatedStorage(clock=clock, save_s=save_s)
        self.storage.stores = self.network.stores
        self.group: SimulatedGroup | None = None
        self.term = 0
        self.moment: Callable[[int, At], None] = lambda step, phase: None
        self.has_room: Callable[[SimulatedWorker], bool] = lambda worker: True  # beside other runs
        self.watched: Callable[[int, At], bool] = lambda step, phase: False
        self.every = policy.checkpoints.every
        self.forms: dict[int, Form] = {}
        self.line: dict[int, int] = {0: 0}  # step -> the generation that committed it, of the kept lineage
        self.peers = SimulatedPeers()
        self.evaluation: Evaluate | None = None  # after the step that is about to be committed
        self.preparations = SimulatedPreparations(self)
        self.code_s = 0.0  # that the next group which forms spends in the job's own code

    # -- workers ---------------------------------------------------------------------------------------------

    def kill(self, worker: SimulatedWorker, *, notice_s: float = 0.05, kind: CauseKind = "death") -> None:
        """End a process. The controller's watch notices; its group notices by itself."""
        if worker.died is not None:
            return
        worker.died = self.clock.now
        cause = Cause(kind=kind, detail=f"{worker.name} ended")
        self.clock.after(
            notice_s, lambda: self.tell(self.term, WorkerLost(at=0.0, worker=worker.name, cause=cause))
        )
        if self.group is not None and worker in self.group.workers:
            self._break(self.group, "connection reset by peer")

    def stop(self, worker: SimulatedWorker, seconds: float | None) -> None:
        """Hold a process still. Silence beyond the liveness limit counts as its end."""
        worker.stopped_until = FOREVER if seconds is None else self.clock.now + seconds
        self.clock.after(self.policy.timing.liveness_s, lambda: self._check_silence(worker))

    def _check_silence(self, worker: SimulatedWorker) -> None:
        if worker.stopped_until > self.clock.now:
            self.kill(worker, notice_s=0.0, kind="silence")

    # -- commands --------------------------------------------------------------------------------------------

    def perform(self, term: int, command: Command) -> None:
        match command:
            case Commit():
                self.storage.order(term, command, self.tell)
            case Prune(keep=keep):
                self.storage.order_prune(term, keep)
            case ReadLog():
                self.storage.read_log(term, self.tell)
            case End():
                pass
            case AskPeers(generation=generation):
                self.clock.after(self.policy.timing.verdict_s, lambda: self._peers_told(generation))
            case Forget(generation=generation, step=step):
                for worker in self.workers.values():
                    if generation in worker.logs:
                        worker.logs[generation] = max(worker.logs[generation], step + 1)
            case _ if term < self.term:
                pass
            case StartWorker(worker=name, node=node):
                self._start(name, node)
            case StopWorker(worker=name):
                if name in self.workers:  # one that no order reaches is disowned when it speaks
                    self.kill(self.workers[name])
            case Abort(generation=generation, workers=names):
                for name in names:
                    self.clock.after(
                        self.clock.draw.uniform(0.01, 0.1), lambda n=name: self._abort(n, generation)
                    )
            case Pause(generation=generation, save=save):
                self._request(generation, pause=True, save=save)
            case Save(generation=generation):
                self._request(generation, pause=False, save=True)
            case Prepare() | Dismiss():
                self.preparations.order(command)
            case Form():
                self._form(command)
            case Go(generation=generation):
                group = self.group
                if group is not None and group.generation == generation and group.ready:
                    group.told |= {w.name for w in group.workers if self.network.hears(w.node)}
                    if not group.training and len(group.told) == len(group.workers):
                        group.training = True
                        self._begin_step(group)

    def _start(self, name: str, node: str) -> None:
        if name in self.workers:
            return
        worker = self.workers[name] = SimulatedWorker(name=name, node=node)
        if node not in self.nodes:
            self.kill(worker, notice_s=1.0)
            return

        def up() -> None:
            if worker.died is None and not self.has_room(worker):
                if not worker.lacks_room:
                    worker.lacks_room = True
                    self.tell(0, LacksRoom(at=0.0, worker=name, holders="other runs have it"))
                self.clock.after(ROOM_S, up)
            elif worker.died is None:
                worker.ready = True
                self.say(worker, WorkerReady(at=0.0, worker=name, node=node, pid=1))

        self.clock.after(self.clock.draw.uniform(2.0, 6.0), up)

    def _abort(self, name: str, generation: int) -> None:
        worker = self.workers[name]
        if worker.died is not None:
            return
        if worker.stopped_until > self.clock.now or not self.network.hears(worker.node):
            self.kill(worker, notice_s=self.policy.timing.verdict_s, kind="silence")
            return
        if self.group is not None and self.group.generation == generation:
            self._break(self.group, "aborted", aloud=False)
        self._final_report(worker, generation, None)

    def _peers_told(self, generation: int) -> None:
        self.tell(0, PeersReported(at=0.0, generation=generation, snapshots=self.peers.told(self.nodes)))

    def _final_report(self, worker: SimulatedWorker, generation: int, error: Cause | None) -> None:
        if worker.hung:
            return
        worker.settled.add(generation)
        held = worker.local_states.get(generation)
        if held is not None and held.applied is not None and held.applied.step == held.step:
            self.say(worker, committed(generation, held.step, self.step_s))
        self.say(
            worker,
            FinalReport(
                at=0.0,
                generation=generation,
                worker=worker.name,
                local_states=worker.all_held(),
                error=error,
                logs=simulated_log.sent(worker),
            ),
        )

    # -- the group -------------------------------------------------------------------------------------------

    def _form(self, command: Form) -> None:
        if self.group is not None and self.group.generation >= command.generation:
            return
        self.forms[command.generation] = command
        workers = [self.workers[name] for name in command.plan.workers]
        heard = all(self.network.hears(worker.node) for worker in workers)
        group = self.group = SimulatedGroup(form=command, workers=workers, step=command.lineage[-1][1])
        if isinstance(command.origin, Live | Mixed):
            for name in command.holders:
                roll_forward(self.workers[name], command.origin)
        for worker in workers:
            worker.generation = command.generation
        takes = self.clock.draw.uniform(0.3, 2.0) * (0.2 if self.preparations.take(command) else 1.0)
        group.moved, group.busy_until = self.clock.now, self.clock.now + self.code_s
        takes, self.code_s = takes + self.code_s, 0.0
        if simulated_log.replays(command):
            self.clock.after(takes, lambda: self._replayed(group))
            takes += self.clock.draw.uniform(0.3, 2.0)
        if heard:  # else an order is lost, and the group never forms
            self.clock.after(takes, lambda: self._formed(group))
        self.moment(group.step + 1, "forming")

    def _replayed(self, group: SimulatedGroup) -> None:
        """Lost stages are back, if nobody of the group ended meanwhile."""
        involved = [*group.workers, *(self.workers[name] for name in group.form.holders)]
        if group.broken or self.group is not group or any(w.died is not None for w in involved):
            return
        for name, local_state, first in simulated_log.replays(group.form):
            worker = self.workers[name]
            worker.replayed[local_state.generation, local_state.rank] = local_state
            worker.logs.setdefault(local_state.generation, first)

    def _formed(self, group: SimulatedGroup) -> None:
        if group.broken or self.group is not group:
            return
        nodes = {worker.node for worker in group.workers}
        if late := self.network.peers_wait_s(nodes):
            self.clock.after(late, lambda: self._formed(group))
            return
        used = checkpoint_of(group.form.origin)
        if used is not None and self.storage.hangs_s:
            self.clock.after(self.storage.hangs_s, lambda: self._formed(group))
            return
        if used is not None and (self.storage.is_down or not all(map(self.network.stores, nodes))):
            self._break(group, "503 slow down", kind="storage")
            return
        if used is not None and used.slot in self.storage.damaged:
            fallback = self.storage.sound(used.slot)
            rejected = CheckpointRejected(at=0.0, stored=used, problem="damaged", fallback=fallback)
            self.tell(0, rejected)
            return
        involved = [*group.workers, *(self.workers[name] for name in group.form.holders)]
        peers = group.form.origin.peers if isinstance(group.form.origin, Mixed) else ()
        if any(w.died is not None for w in involved) or any(s.peer_store not in self.nodes for s in peers):
            self._break(group, "a member is gone")
        elif late := max((w.stopped_until - self.clock.now for w in involved), default=0.0):
            if 0.0 < late < FOREVER:
                self.clock.after(late, lambda: self._formed(group))
                return
            if late == FOREVER:
                return
            if any(w.hung for w in involved):
                return
            simulated_log.begin(group, self.forms)
            group.fill()
            self.say(
                group.workers[0],
                GroupReady(
                    at=0.0,
                    generation=group.generation,
                    step=group.step,
                    seconds=1.0,
                    late=len(group.late),
                ),
            )

    def _begin_step(self, group: SimulatedGroup) -> None:
        if group.broken or self.group is not group:
            return
        group.phase, group.moved = "forward", self.clock.now
        step = group.step + 1
        if step > self.policy.max_steps:
            if group.save:
                self._save(group)
            return
        nodes = {w.node for w in group.workers}
        seconds = self.step_s + max((n.slow_s for n in self.nodes.values() if n.name in nodes), default=0.0)
        if group.late:
            self.clock.after(FILLING_AT * seconds, lambda: self._reach(group, step, "filling"))
            self.clock.after(FILLED_AT * seconds, group.arrive)
        for phase, share in PHASE_AT:
            if self.watched(step, phase):
                self.clock.after(share * seconds, lambda p=phase: self._reach(group, step, p))
        self.clock.after(seconds, lambda: self._end_step(group, step))

    def _reach(self, group: SimulatedGroup, step: int, phase: At) -> None:
        if self.group is group and not group.broken and group.step == step - 1:
            group.phase = phase
            self.moment(step, phase)

    def _end_step(self, group: SimulatedGroup, step: int) -> None:
        if group.broken or self.group is not group:
            return
        late = max(w.stopped_until for w in group.workers) - self.clock.now
        late = max(late, self.network.peers_wait_s({w.node for w in group.workers}))
        if any(w.hung for w in group.workers):
            return
        if late > 0:
            if late < FOREVER:
                self.clock.after(late, lambda: self._end_step(group, step))
            return
        group.commit()
        self.line[step] = group.generation
        group.phase, group.moved = "save", self.clock.now
        if self.policy.peers:
            self.peers.commit(group)
        self.say(group.workers[0], committed(group.generation, step, self.step_s))
        if self.watched(step, "save"):
            self.moment(step, "save")
        due = isinstance(self.every, int) and step % self.every == 0
        if due or group.save or step == self.policy.max_steps:
            self._save(group)
        if self.evaluation is None:
            self._stand(group)
        else:
            group.mark_s, seconds = self.evaluation.mark_s, self.evaluation.seconds
            self.evaluation, group.busy_until = None, self.clock.now + seconds
            self.clock.after(seconds, lambda: self._stand(group))

    def _stand(self, group: SimulatedGroup) -> None:
        """At a step boundary: pause if asked to, otherwise go on."""
        if group.broken:
            return
        if group.pause and group.step < self.policy.max_steps:
            group.paused = True
            for worker in group.workers:
                self._final_report(worker, group.generation, None)
        else:
            self._begin_step(group)

    def moved_s(self) -> float | None:
        """For how long nobody of the group was seen to move, and storage took no bytes of it."""
        if self.group is None:
            return None
        moved_s = self.group.moved_s(self.clock.now)
        writes = self.storage.writes(self.group.generation)
        return 0.0 if moved_s is not None and writes else moved_s

    def _save(self, group: SimulatedGroup) -> None:
        group.save = False
        self.storage.save(group, self.say)

    def _request(self, generation: int, *, pause: bool, save: bool) -> None:
        group = self.group
        if group is None or group.generation != generation or group.broken:
            return
        if not any(self.network.hears(worker.node) for worker in group.workers):
            return
        group.pause, group.save = group.pause or pause, group.save or save
        if group.paused or group.step >= self.policy.max_steps:
            if save:
                self._save(group)
            if group.paused:
                self._stand(group)

    def break_group(self, detail: str) -> None:
        if self.group is not None:
            self._break(self.group, detail)

    def _break(
        self, group: SimulatedGroup, detail: str, *, aloud: bool = True, kind: CauseKind = "collective"
    ) -> None:
        if group.broken:
            return
        if group.shatter(self.clock.draw):
            self.line[group.step + 1] = group.generation
        if not aloud:
            return
        for worker in group.workers:
            if (
                worker.died is None and not worker.hung and self.clock.draw.random() < 0.7
            ):  # the others hang until they are aborted
                cause = Cause(kind=kind, detail=detail)
                self.say(
                    worker, GroupBroken(at=0.0, generation=group.generation, worker=worker.name, cause=cause)
                )
                self._final_report(worker, group.generation, cause)
