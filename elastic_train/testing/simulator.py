"""The controller in virtual time: the same transition and fault schedules, thousands of runs in a minute."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_train.config import Checkpoints, Timing
from elastic_train.control.events import (
    Adopted,
    Event,
    FencedOff,
    NodesChanged,
    StopRequested,
    TermBegan,
    Tick,
)
from elastic_train.control.fault_schedule import (
    AddNode,
    At,
    BreakRank,
    DamageCheckpoint,
    DrainNode,
    ExhaustMemory,
    FailStorage,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    SlowNode,
    StopRank,
)
from elastic_train.control.journal_codec import changed, fold
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, Outcome, State
from elastic_train.control.transition import transition
from elastic_train.observe.journal_records import Record, record, wall_text
from elastic_train.testing.invariants import check_transition
from elastic_train.testing.simulated_cluster import SimulatedCluster
from elastic_train.testing.simulated_faults import (
    AnyFault,
    BlindObserver,
    CutOff,
    Evaluate,
    FreezeController,
    HangRank,
    HangStorage,
    JumpClock,
    LoseCommits,
    SlowCode,
    SlowWrites,
    Weather,
)
from elastic_train.testing.simulated_planners import PipelinePlanner, SimplePlanner
from elastic_train.testing.simulated_stalls import hang, stand_apart
from elastic_train.testing.simulated_time import Clock

RESTART_S = 1.5
ZOMBIE_S = 30.0


def simulated_policy(
    *,
    replicas: int | None = 2,
    context: int = 1,
    max_steps: int = 15,
    every: int = 4,
    max_failures: int = 50,
    stages: bool = False,
    peers: bool = False,
    prepares: bool = False,
) -> Policy:
    """A small run: 2 to 4 workers and one standby, deadlines in proportion to two-second steps."""
    return Policy(
        plan=PipelinePlanner() if stages else SimplePlanner(replicas=replicas, context=context),
        min_workers=2,
        max_workers=4,
        standby=1,
        max_steps=max_steps,
        max_failures=max_failures,
        checkpoints=Checkpoints(every=every, keep=2),
        timing=Timing(
            heartbeat_s=2.0,
            liveness_s=8.0,
            settle_s=10.0,
            form_s=20.0,
            join_window_s=3.0,
            start_worker_s=20.0,
            progress_s=60.0,
            storage_trouble_s=120.0,
        ),
        quarantine_s=20.0,
        logs=stages,
        peers=peers,
        prepares=prepares,
    )


@dataclass(slots=True)
class SimulatedController:
    """One term. A zombie goes on after its successor began, and only storage can stop it."""

    term: int
    began: float
    state: State
    zombie: bool = False
    dead: bool = False


@dataclass(slots=True, eq=False)
class Simulation:
    """A run under a schedule. `journal` holds what was journalled, of all terms."""

    policy: Policy
    schedule: FaultSchedule | Weather
    nodes: tuple[str, ...] = ("a", "b", "c", "d")
    spares: int = 4  # nodes that come one by one while there is too little capacity, so that the run can end
    limit_s: float = 3000.0
    stop_at: float | None = None  # when a person asks the run to stop
    name: str = ""  # among several on one cluster
    shared: Clock | None = None  # the clock of all of them
    beside: list[Simulation] = field(
        default_factory=list["Simulation"]
    )  # whom what happens to a node befalls
    refold: bool = True  # compare with the fold of the whole journal at the end, as at each change of terms
    journal: list[Event] = field(default_factory=list[Event])
    records: list[Record] | None = None
    transitions: int = 0
    clock: Clock = field(init=False)
    cluster: SimulatedCluster = field(init=False)
    controller: SimulatedController = field(init=False)
    _pending: list[AnyFault] = field(init=False)
    _unheard: list[Event] = field(default_factory=list[Event])
    _doomed: bool = False
    _frozen_since: float = 0.0
    _frozen_until: float = 0.0
    _jumped: float = 0.0  # by how much the clock went forward since the last tick

    def __post_init__(self) -> None:
        self.clock = self.shared if self.shared is not None else Clock(self.schedule.seed or 0)
        self.cluster = SimulatedCluster(self.clock, self.policy)
        self.cluster.tell = self._tell
        self.cluster.moment = self._moment
        self.cluster.watched = lambda step, phase: any(
            f.when.step == step and f.when.phase == phase for f in self._pending
        )
        self._pending = list(self.schedule.faults)

    def run(self) -> Ended:
        """Until the run ends. Raises AssertionError, with the seed, where an invariant does not hold."""
        try:
            self.start()
            while not self.has_ended:
                assert self.clock.now < self.limit_s, "the run ends when capacity allows"
                assert self.clock.step()
            return self.ended()
        except AssertionError as broken:
            raise AssertionError(f"seed {self.schedule.seed}: {broken}") from broken

    @property
    def has_ended(self) -> bool:
        return isinstance(self.controller.state.phase, Ended)

    def ended(self) -> Ended:
        """How the run ended."""
        folded = self.refold and fold(self.journal, self.policy)
        assert not folded or folded == self.controller.state, "the journal folds to the state"
        assert isinstance(self.controller.state.phase, Ended)
        return self.controller.state.phase

    # -- terms -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Put the run's first moments into the clock."""
        self.controller = SimulatedController(term=0, began=0.0, state=State(), dead=True)
        for node in self.nodes:
            self.cluster.add_node(node)
        self._begin_term()
        self.clock.after(0.0, self._tick)
        if self.stop_at is not None:
            self.clock.after(self.stop_at, lambda: self._tell(0, StopRequested(at=0.0, reason="asked")))

    def _begin_term(self) -> None:
        folded = fold(self.journal, self.policy)
        before = self.controller
        assert folded == before.state, "the journal folds to the state"
        term = before.term + 1
        self.cluster.term = term
        self.cluster.storage.begin(term)
        self.controller = SimulatedController(term=term, began=self.clock.now, state=folded)
        self._frozen_until = self._jumped = 0.0
        storage = self.cluster.storage
        self._handle(
            self.controller,
            TermBegan(at=0.0, term=term, stored=storage.newest(), ever_stored=storage.ever, again=term > 1),
        )
        if term > 1:
            living = tuple(
                (w.name, w.node, w.generation, self._step_of(w.name))
                for w in self.cluster.workers.values()
                if w.responds(self.clock.now)
            )
            silent = tuple(
                w.name
                for w in self.cluster.workers.values()
                if w.died is None and not w.responds(self.clock.now)
            )
            self._handle(self.controller, Adopted(at=0.0, running=living, silent=silent))
        self._handle(self.controller, NodesChanged(at=0.0, nodes=self.cluster.present()))
        unheard, self._unheard = self._unheard, []
        for event in unheard:
            self._tell(0, event)

    def _step_of(self, name: str) -> int:
        worker = self.cluster.workers[name]
        held = worker.local_states.get(worker.generation)
        return held.step if held is not None else 0

    def _crash(self) -> None:
        """The controller is gone, or stands still for longer than its lease and does not know it."""
        old = self.controller
        self.clock.after(RESTART_S, self._begin_term)
        if self.clock.draw.random() < 0.3:
            zombie = SimulatedController(term=old.term, began=old.began, state=old.state, zombie=True)
            self.clock.after(RESTART_S + 1.0, lambda: self._haunt(zombie, self.clock.now + ZOMBIE_S))
        self.controller = replace(old, dead=True)

    def _haunt(self, zombie: SimulatedController, until: float) -> None:
        if self.clock.now < until and not isinstance(zombie.state.phase, Ended):
            self._handle(zombie, Tick(at=0.0, moved_s=60.0))
            self.clock.after(self.policy.tick_s, lambda: self._haunt(zombie, until))

    def _tick(self) -> None:
        self._relieve()
        if not self.controller.dead and not self._frozen:
            self._pass_time()
        self.clock.after(self.policy.tick_s, self._tick)

    def _pass_time(self) -> None:
        late, self._jumped = self._jumped, 0.0
        self._handle(self.controller, Tick(at=0.0, late=late, moved_s=self.cluster.moved_s()))

    @property
    def _frozen(self) -> bool:
        return self._frozen_until > self.clock.now

    def _thaw(self) -> None:
        """Time that passed unseen shows as a late tick, before what waits is heard."""
        if self.controller.dead or self._frozen:
            return
        self._jumped += self.clock.now - self._frozen_since
        unheard, self._unheard = self._unheard, []
        self._pass_time()
        self._handle(self.controller, NodesChanged(at=0.0, nodes=self.cluster.present()))
        for event in unheard:
            self._tell(0, event)

    # -- events ----------------------------------------------------------------------------------------------

    def _tell(self, term: int, event: Event) -> None:
        controller = self.controller
        if term not in (0, controller.term):
            return  # its controller is gone
        if controller.dead or self._frozen:
            if (term == 0 or not controller.dead) and not isinstance(event, NodesChanged):
                self._unheard.append(event)
            return
        if self._jumped > self.policy.tick_s:
            self._pass_time()
        self._handle(self.controller, event)

    def _handle(self, controller: SimulatedController, event: Event) -> None:
        if controller.dead:  # in the middle of what it was told when it began
            return
        event = replace(event, at=self.clock.now - controller.began)
        before = controller.state
        outcome = transition(before, event, self.policy)
        self.transitions += 1
        controller.state = outcome.state
        if controller.zombie:
            if changed(before, outcome):
                self._journal_late(controller, event)
            for command in outcome.commands:
                self.cluster.perform(controller.term, command)
            return
        check_transition(before, event, outcome, self.cluster)
        if changed(before, outcome):
            self.journal.append(event)
            self._record(event, outcome)
        if self._doomed and outcome.commands:
            self._doomed = False
            self._crash()
            if self.clock.draw.random() < 0.5:
                return  # after journalling, before performing
        for command in outcome.commands:
            self.cluster.perform(controller.term, command)

    def _journal_late(self, zombie: SimulatedController, event: Event) -> None:
        """What an ousted controller writes down is void, and tells it that it is ousted."""
        if self.cluster.storage.journals(zombie.term):
            self.journal.append(event)
            return
        by = FencedOff(at=event.at, by_term=self.cluster.storage.fence)
        zombie.state = transition(zombie.state, by, self.policy).state

    def _record(self, event: Event, outcome: Outcome) -> None:
        if self.records is not None:
            self.records.append(record(len(self.records), wall_text(self.clock.now), event, outcome))

    # -- faults ----------------------------------------------------------------------------------------------

    def _moment(self, step: int, phase: At) -> None:
        due = [f for f in self._pending if f.when.phase == phase and f.when.meets(step)]
        for fault in due:
            self._pending.remove(fault)
            self._do(fault)

    def _do(self, fault: AnyFault) -> None:
        cluster = self.cluster
        everybody = [cluster, *(one.cluster for one in self.beside)]
        match fault:
            case KillNode(node=node):
                for one in everybody:
                    one.kill_node(node)
            case AddNode(node=node, slots=slots):
                for one in everybody:
                    one.add_node(node, slots)
            case DrainNode(node=node, notice_s=notice_s):
                for one in everybody:
                    one.drain_node(node, notice_s)
            case KillRank(rank=rank) | StopRank(rank=rank) | BreakRank(rank=rank) | ExhaustMemory(rank=rank):
                assert cluster.group is not None
                worker = cluster.group.workers[rank % len(cluster.group.workers)]
                if isinstance(fault, KillRank):
                    cluster.kill(worker)
                elif isinstance(fault, ExhaustMemory):
                    cluster.kill(worker, kind="memory")
                elif isinstance(fault, BreakRank):
                    cluster.break_group("a collective raised")
                else:
                    cluster.stop(worker, fault.seconds)
            case SlowNode(node=node, seconds=seconds):
                if node in cluster.nodes:
                    cluster.nodes[node].slow_s = seconds
            case KillController():
                self._doomed = True
            case DamageCheckpoint():
                cluster.storage.damage()
            case FailStorage(seconds=seconds):
                cluster.storage.down_until = self.clock.now + seconds
            case HangStorage(seconds=seconds):
                cluster.storage.hangs_until = self.clock.now + seconds
            case LoseCommits(count=count):
                cluster.storage.commits_lost += count
            case Evaluate():
                cluster.evaluation = fault
            case SlowCode(seconds=seconds):
                cluster.code_s = seconds
            case BlindObserver(seconds=seconds):
                cluster.blind(seconds)
            case HangRank(rank=rank):
                assert cluster.group is not None
                hang(cluster, cluster.group.workers[rank % len(cluster.group.workers)])
            case CutOff():
                self._cut_off(fault)
            case FreezeController(seconds=seconds):
                self._frozen_since = self._frozen_since if self._frozen else self.clock.now
                self._frozen_until = max(self._frozen_until, self.clock.now + seconds)
                self.clock.after(seconds, self._thaw)
            case JumpClock(seconds=seconds):
                self.controller.began -= seconds
                self._jumped += max(seconds, 0.0)
            case SlowWrites(times=times):
                cluster.storage.slow = times

    def _cut_off(self, fault: CutOff) -> None:
        ways = {"words": fault.words, "orders": fault.orders, "storage": fault.storage}
        self.cluster.cut(fault.nodes, fault.seconds, self.policy.timing.liveness_s, **ways)
        if fault.peers:
            stand_apart(self.cluster, fault.nodes, fault.seconds)

    def _relieve(self) -> None:
        """A new machine where too few are left."""
        staying = [n for n in self.cluster.nodes.values() if n.drain_by is None]
        if len(staying) < self.policy.min_workers and self.spares:
            self.spares -= 1
            for cluster in (self.cluster, *(one.cluster for one in self.beside)):
                cluster.add_node(f"spare{self.name}{self.spares}")
