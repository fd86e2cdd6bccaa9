"""Start or resume a run in a new controller term, and adopt the workers that are alive."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elastic_train.control import final_checkpoint, preparation
from elastic_train.control.commands import (
    Abort,
    AskPeers,
    Command,
    Dismiss,
    End,
    Go,
    Pause,
    ReadLog,
    Save,
    StartWorker,
    StopWorker,
)
from elastic_train.control.commits import commit_command
from elastic_train.control.deadlines import shifted
from elastic_train.control.ending import end
from elastic_train.control.events import Adopted, Cause, TermBegan
from elastic_train.control.failure import break_group, worker_lost
from elastic_train.control.forming import form_command
from elastic_train.control.membership import ready
from elastic_train.control.policy import Policy
from elastic_train.control.states import (
    Ended,
    Facts,
    Forming,
    Outcome,
    Pausing,
    Running,
    Settling,
    State,
    Waiting,
    Worker,
)
from elastic_train.control.unanswered_commits import with_newest
from elastic_train.planner.plan import counted

LivingWorkers = dict[str, tuple[int, int]]
"""By living worker: the generation that it runs, 0 for none, and its step."""


def term_began(state: State, event: TermBegan, policy: Policy) -> Outcome:
    """Take the run over. What was going on goes on; a run that had ended starts again from what is stored."""
    before, shift = state.facts, event.at - state.now
    state = shifted(state, shift)
    facts = replace(
        state.facts,
        term=event.term,
        membership=replace(
            state.facts.membership,
            nodes=tuple(
                replace(n, drain_by=n.drain_by + shift) if n.drain_by is not None else n
                for n in state.facts.membership.nodes
            ),
        ),
        saves=replace(state.facts.saves, ever_stored=state.facts.saves.ever_stored or event.ever_stored),
    )
    over = before.term == 0 or isinstance(state.phase, Ended)
    facts = with_newest(facts, event.stored, event.kept, trusted=over)
    state = replace(state, facts=facts)
    if event.finished or (event.stored is not None and event.stored.step >= policy.max_steps):
        step = event.stored.step if event.stored is not None else facts.lineage.step
        return end(
            state, "finished", f"already complete: step {step} of {policy.max_steps} is committed and saved"
        )
    if before.term == 0:
        phase, said = Waiting(since=event.at), "the run begins"
    elif isinstance(state.phase, Ended):
        phase, said = Waiting(since=event.at), f"the run starts again; it had ended as {state.phase.outcome}"
        state = replace(state, facts=afresh(facts))
    else:
        phase, said = state.phase, f"the run goes on in term {event.term}"
        restarts = facts.failures.restarts + 1
        if event.again and restarts > policy.restarts:
            return end(
                state,
                "infrastructure",
                f"the controller was replaced {restarts} times without a committed step between",
            )
        failures = replace(facts.failures, restarts=restarts if event.again else 0)
        state = replace(state, facts=replace(facts, failures=failures))
    return Outcome(state=replace(state, phase=phase), reason=said)


def adopted(state: State, event: Adopted, policy: Policy) -> Outcome:
    """Reconcile what the journal says with who is alive."""
    known = {w.name: w for w in state.facts.membership.workers}
    living = {name: (generation, step) for name, _, generation, step in event.running}
    starting = tuple(known[n] for n in event.silent if n in known and known[n].status == "starting")
    strangers = tuple(name for name in (*living, *event.silent) if name not in known)
    mute = tuple(name for name in event.silent if name in known and known[name] not in starting)
    stops = (
        *(StopWorker(worker=name, reason="this run does not know it") for name in strangers),
        *(StopWorker(worker=name, reason="it did not answer the new controller") for name in mute),
    )
    if living.keys() <= set(strangers):
        alone = _alone(state, starting, event.at)
        return Outcome(
            state=alone,
            commands=(*stops, *resume_commands(alone, policy)),
            reason="nobody is left: the run starts from storage"
            if known
            else "no worker is up yet: the run starts from its newest checkpoint, if it has one",
        )
    facts, logged = (
        replace(state.facts, saves=replace(state.facts.saves, logged=None)),
        state.facts.saves.logged,
    )
    if logged is not None and not _holds(facts, living):
        facts = with_newest(facts, logged, trusted=True)
    for worker in facts.membership.workers:
        if worker.name in living and worker.status == "starting":
            facts = replace(facts, membership=ready(facts.membership, worker.name, event.at))
    outcome = Outcome(  # what was being made ready went with whoever led it
        state=replace(state, facts=facts, phase=preparation.without(state.phase)),
        commands=(*stops, *_dismissals(living, policy)),
        reason=f"{counted(len(living.keys() & known.keys()), 'worker', ('lives', 'live'))} on",
    )
    outcome = outcome.then(lambda s: _reconcile(s, living, policy, event.at))
    gone = Cause(kind="death", detail="it was gone when the controller came back")
    for worker in facts.membership.workers:
        if worker.name not in living and worker not in starting:
            outcome = outcome.then(lambda s, name=worker.name: worker_lost(s, name, gone, policy, event.at))
    return outcome.then(
        lambda s: Outcome(state=s, commands=_new(resume_commands(s, policy), outcome.commands))
    )


def resume_commands(state: State, policy: Policy) -> tuple[Command, ...]:
    """The commands of the current phase, to be performed again; each is idempotent."""
    facts, phase = state.facts, state.phase
    commands: list[Command] = [
        StartWorker(worker=w.name, node=w.node) for w in facts.membership.workers if w.status == "starting"
    ]
    match phase:
        case Waiting():
            if facts.survived.asking:
                commands.append(AskPeers(generation=facts.lineage.generation))
            if facts.saves.reading is not None:
                commands.append(ReadLog())
        case Forming():
            commands.append(form_command(facts, phase))
        case Running():
            commands.append(Go(generation=facts.lineage.generation))
            if final_checkpoint.is_missing(state, policy):
                commands.append(Save(generation=facts.lineage.generation))
        case Pausing(save=save):
            commands += [
                Go(generation=facts.lineage.generation),
                Pause(generation=facts.lineage.generation, save=save),
            ]
        case Settling(pending=pending):
            commands.append(Abort(generation=facts.lineage.generation, workers=pending))
        case Ended(outcome=outcome, detail=detail, cause=cause, worker=worker):
            return (End(outcome=outcome, detail=detail, cause=cause, worker=worker),)
        case _:
            assert_never(phase)
    return (*commands, *(commit_command(facts.saves, a) for a in facts.saves.attempts if a.committing))


def _reconcile(state: State, living: LivingWorkers, policy: Policy, at: float) -> Outcome:
    """A group goes on if every member is alive in its generation; one that was forming starts over."""
    facts, phase = state.facts, state.phase
    match phase:
        case Forming():
            cause = Cause(kind="restart", detail="the controller was replaced while the group formed")
            return break_group(state, cause, policy, at)
        case Running(plan=plan):
            strayed = [w for w in plan.workers if w in living and living[w][0] != facts.lineage.generation]
            if strayed:
                cause = Cause(
                    kind="collective", detail=f"{strayed[0]} is in generation {living[strayed[0]][0]}"
                )
                broken = break_group(state, cause, policy, at)
                stray = {living[w][0] for w in strayed} - {0}
                aborts = tuple(
                    Abort(generation=g, workers=tuple(w for w in strayed if living[w][0] == g))
                    for g in sorted(stray)
                )
                return replace(broken, commands=(*aborts, *broken.commands))
            steps = [living[w][1] for w in plan.workers if w in living]
            lineage = replace(facts.lineage, step=max((facts.lineage.step, *steps)))
            return Outcome(state=replace(state, facts=replace(facts, lineage=lineage)))
        case _:
            return Outcome(state=state)


def _alone(state: State, starting: tuple[Worker, ...], at: float) -> State:
    """Everybody is gone, and what they held: that is a new start, not a failure. A request to stop outlives
    the controller that heard it, but not a person's request to start."""
    facts, restarts = afresh(state.facts), state.facts.failures.restarts
    facts = replace(facts, membership=replace(facts.membership, workers=starting))
    if restarts:
        failures, kept = replace(facts.failures, restarts=restarts), state.facts
        facts = replace(facts, stopping=kept.stopping, stops_as=kept.stops_as, failures=failures)
    if (logged := facts.saves.logged) is not None:
        facts = replace(facts, saves=replace(facts.saves, logged=None))
        facts = with_newest(facts, logged, trusted=True)
    return replace(state, facts=facts, phase=Waiting(since=at))


def _dismissals(living: LivingWorkers, policy: Policy) -> tuple[Command, ...]:
    """An order to forget may have gone with the controller that decided it."""
    if not policy.prepares or not living:
        return ()
    return (Dismiss(generation=0, number=0, workers=tuple(sorted(living))),)


def _holds(facts: Facts, living: LivingWorkers) -> bool:
    """Whether somebody who is alive may hold state of a group."""
    return any(generation for generation, _ in living.values()) or any(
        held for worker, held in facts.survived.local_states if worker in living
    )


def afresh(facts: Facts) -> Facts:
    """What a new start forgets: old processes, what they held and wrote, and the budgets."""
    return replace(
        facts,
        stopping=None,
        stops_as="stopped",
        membership=replace(facts.membership, workers=(), flaps=(), slow=(), evicted=(), rests_until=0.0),
        survived=replace(facts.survived, local_states=(), logs=(), snapshots=None, asking=False),
        saves=replace(
            facts.saves,
            unsure=False,
            reading=None,
            attempts=(),
            trouble=None,
            unsaved=None,
            final_tries=0,
            asked=None,
        ),
        failures=replace(
            facts.failures,
            incidents=(),
            count=0,
            repeated=(0, 0),
            last_step=0,
            deterministic=(),
            not_finite=None,
            restarts=0,
            preemptions=0,
        ),
        measured=replace(facts.measured, peer_memory=(), resized=None),
        lineage=replace(facts.lineage, ended=None),
    )


def _new(commands: tuple[Command, ...], known: tuple[Command, ...]) -> tuple[Command, ...]:
    return tuple(c for c in commands if c not in known)
