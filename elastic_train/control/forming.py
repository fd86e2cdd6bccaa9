"""From waiting to a group: when to form, with whom, from what.

A first group forms when every worker that was started is up, or when enough are up and nobody came for the
join window. After a failure or a pause state is held in memory and nobody waits for a cold start: whoever is
ready takes a rank, others join later.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import AskPeers, Command, Form, Go, Save, StopWorker
from elastic_train.control.ending import end
from elastic_train.control.events import GroupReady, PeersReported
from elastic_train.control.keep_ranks import keep_places
from elastic_train.control.lost_answers import read_log
from elastic_train.control.membership import (
    at_hand,
    draining,
    keep_all_nodes,
    present,
    starting,
    worker_slots,
)
from elastic_train.control.planner_questions import held, last_plan, to_form
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Forming, Outcome, Running, State, Waiting, Worker
from elastic_train.control.stopping import end_stopped
from elastic_train.control.trouble import over, rests, unblocked
from elastic_train.planner.plan import Infeasible, Plan
from elastic_train.planner.question import Planned, Question
from elastic_train.recovery.choose_recovery import Choice, Evidence, Unrecoverable, choose, holders, votes
from elastic_train.recovery.evidence import Live, Mixed, Stored, checkpoint_of
from elastic_train.recovery.lineage import alive, extend
from elastic_train.recovery.logs import logged

GENERATIONS_PER_TERM = 1000
"""Generations of a term are numbered from here on, so that a predecessor that hasn't noticed its end yet
forms none with the same number, and writes into no directory of its successor."""

PLANS_KEPT = 4


def best_plan(question: Question, policy: Policy) -> Planned | Infeasible:
    """The planner's choice, within the bounds that the user set."""
    workers = len(question.worker_slots)
    if workers < policy.min_workers:
        return Infeasible(reason=f"{workers} workers are ready, at least {policy.min_workers} are needed")
    planned = policy.plan(question)
    if isinstance(planned, Planned) and planned.plan.world_size < policy.min_workers:
        plan = planned.plan
        return Infeasible(
            reason=f"of {workers} workers the planner can use {plan.world_size} ({plan}), "
            f"at least {policy.min_workers} are needed"
        )
    return planned


def evidence(facts: Facts) -> Evidence:
    last = last_plan(facts)
    seated = set(last.workers) if last is not None else set[str]()
    free = {slot.node for slot in worker_slots(facts, last) if slot.worker not in seated}
    snapshots = [s for s in facts.snapshots or () if not _suspect(facts, s.generation, s.step)]
    found = Evidence(
        lineage=facts.lineage,
        plans=dict(facts.plans),
        local_states=facts.local_states,
        step=facts.step,
        seen=facts.seen,
        stored=_sound(facts),
        ever_stored=facts.ever_stored and (facts.suspect is None or facts.suspect[1] > 0),
        snapshots=tuple(
            sorted(snapshots, key=lambda s: s.peer_store not in free)
        ),  # the first of equals is read
    )
    plans = {generation: plan for generation, plan in facts.plans if generation > facts.unreplayed}
    return replace(
        found,
        logs=logged(dict(facts.logs), plans, votes(found)),
        costs=replace(found.costs, replayers=len(worker_slots(facts, last))),
    )


def _suspect(facts: Facts, generation: int, step: int) -> bool:
    """Whether what was saved may hold what turned out to be corrupt later."""
    return facts.suspect is not None and generation <= facts.suspect[0] and step > facts.suspect[1]


def _sound(facts: Facts) -> Stored | None:
    """The newest checkpoint that isn't suspect."""
    stored = facts.stored
    if stored is None or not _suspect(facts, stored.generation, stored.step):
        return stored
    older = [c.stored for c in facts.commitments if not _suspect(facts, c.stored.generation, c.stored.step)]
    return older[-1] if older else None


def try_form(state: State, policy: Policy, at: float) -> Outcome:
    """Form a group if it is time to."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Waiting)
    candidates, coming = present(facts), starting(facts)
    if len(candidates) + len(coming) < policy.min_workers:
        return _too_few(state, policy, at)
    if not _complete(phase, candidates, policy, at, coming=bool(coming)):
        return Outcome(state=state)
    planned = best_plan(to_form(facts, held(facts), policy, at), policy)
    if isinstance(planned, Infeasible) and facts.evicted:
        return _too_few(state, policy, at)
    if isinstance(planned, Infeasible):
        if planned.reason == phase.problem:
            return Outcome(state=state)
        return Outcome(
            state=replace(state, phase=replace(phase, problem=planned.reason)),
            reason=f"no plan yet: {planned.reason}",
        )
    choice = choose(evidence(facts))
    if policy.peers and facts.generation and _peers_may_know_more(facts, choice):
        return _ask_peers(state, at)
    if facts.unsure and not (isinstance(choice, Choice) and isinstance(choice.origin, Live | Mixed)):
        return read_log(state, at)
    if facts.stopping is not None and _not_worth_saving(facts, choice):
        return end_stopped(state, f"{facts.stopping}; nothing newer could be recovered: {choice.reason}")
    if isinstance(choice, Unrecoverable):
        return end(state, "checkpoint", choice.reason)
    if _better_on_its_way(facts, choice):
        return Outcome(state=state)
    if checkpoint_of(choice.origin) is not None and rests(facts, at):
        return Outcome(state=state)
    plan = keep_places(planned.plan, last_plan(facts), at_hand(facts))
    return _form(state, replace(planned, plan=plan), choice, at, phase.paused)


def _too_few(state: State, policy: Policy, at: float) -> Outcome:
    """Slow nodes that were left are better than none; a run that only has to stop waits for no machine."""
    facts = state.facts
    if facts.evicted:
        kept = Outcome(
            state=replace(state, facts=keep_all_nodes(facts)),
            reason=f"too few workers without {', '.join(facts.evicted)}, which is slow: it is kept",
        )
        return kept.then(lambda s: try_form(s, policy, at))
    if facts.stopping is not None and not any(n.drain_by is None for n in facts.nodes):
        return end_stopped(state, f"{facts.stopping}; there are no nodes to recover step {facts.step} on")
    return Outcome(state=state)


def _not_worth_saving(facts: Facts, choice: Choice | Unrecoverable) -> bool:
    stored = facts.stored.step if facts.stored is not None else 0
    return isinstance(choice, Unrecoverable) or choice.step <= stored


def peers_reported(state: State, event: PeersReported) -> Outcome:
    """What peer memory holds, where survivors alone don't hold the newest step."""
    facts = state.facts
    if not facts.asking:
        return Outcome(state=state, reason="nobody waits for what the peer stores hold")
    steps = sorted({s.step for s in event.snapshots})
    held = f"steps {', '.join(map(str, steps))}" if steps else "nothing"
    return Outcome(
        state=replace(state, facts=replace(facts, snapshots=event.snapshots, asking=False)),
        reason=f"peer memory holds {held}",
    )


def group_ready(state: State, event: GroupReady, policy: Policy) -> Outcome:
    """Every rank holds its verified state: train. Leaving holders have done their part."""
    facts, phase, at = state.facts, state.phase, event.at
    if not isinstance(phase, Forming):
        return Outcome(state=state, reason=f"generation {facts.generation} is known to be ready")
    leaving = draining(facts)
    seated = set(phase.plan.workers)
    done = tuple(w for w in facts.workers if w.node in leaving and w.name not in seated)
    gone = {w.name for w in done}
    idle = {w.name for w in facts.workers} - gone - seated
    facts = over(facts) if checkpoint_of(phase.origin) is not None else unblocked(facts)
    facts = replace(
        facts,
        workers=tuple(w for w in facts.workers if w.name not in gone),
        local_states=tuple(h for h in facts.local_states if h[0] in idle),
        logs=tuple(h for h in facts.logs if h[0] in idle),
        began=at if facts.began is None else facts.began,
        evicted=(),
        transfer_s=event.transfer_s,
        by_module=facts.by_module if event.by_module is None else event.by_module,
    )
    if phase.paused is not None:
        facts = replace(facts, switch_s=at - phase.paused, resized=at)
    if facts.save_asked is None:
        facts = replace(facts, save_asked=at)
    slow = state.facts.evicted
    commands: list[Command] = [Go(generation=facts.generation)]
    commands += [
        StopWorker(worker=w.name, reason=f"node {w.node} is {'slow' if w.node in slow else 'draining'}")
        for w in done
    ]
    if facts.step >= policy.max_steps:
        commands.append(Save(generation=facts.generation))
    return Outcome(
        state=State(facts=facts, phase=Running(plan=phase.plan, since=at, final_since=at)),
        commands=tuple(commands),
        reason=f"generation {facts.generation} trains on from step {facts.step}: {phase.plan}",
    )


def _complete(
    phase: Waiting, candidates: tuple[Worker, ...], policy: Policy, at: float, *, coming: bool
) -> bool:
    if len(candidates) < policy.min_workers:
        return False
    if phase.prompt or len(candidates) >= policy.max_workers or not coming:
        return True
    last = max(w.since for w in candidates)
    return at - last >= policy.timing.join_window_s


def _peers_may_know_more(facts: Facts, choice: Choice | Unrecoverable) -> bool:
    """Whether peer memory, which was not asked yet, may have a newer step, or spare a read of storage."""
    newest = isinstance(choice, Choice) and (isinstance(choice.origin, Live) or choice.step >= facts.step > 0)
    newest = newest and isinstance(choice, Choice) and checkpoint_of(choice.origin) is None
    if isinstance(choice, Choice) and isinstance(choice.origin, Mixed) and choice.origin.replays:
        newest = False  # it may have what would be replayed, or a nearer base
    return not newest and facts.snapshots is None


def _ask_peers(state: State, at: float) -> Outcome:
    facts = state.facts
    if facts.asking:
        return Outcome(state=state)
    return Outcome(
        state=replace(state, facts=replace(facts, asking=True, asked_at=at)),
        commands=(AskPeers(generation=facts.generation),),
        reason="survivors do not hold the newest step: the peer stores are asked",
    )


def _better_on_its_way(facts: Facts, choice: Choice) -> bool:
    """Whether a commit that was ordered would save more steps; memory never waits for storage."""
    if isinstance(choice.origin, Live | Mixed):
        return False
    return any(
        a.committing and a.step > choice.step and alive(facts.lineage, a.generation, a.step)
        for a in facts.attempts
    )


def _form(state: State, planned: Planned, choice: Choice, at: float, paused: float | None) -> Outcome:
    facts, plan = state.facts, planned.plan
    generation = max(facts.generation, (facts.term - 1) * GENERATIONS_PER_TERM) + 1
    lineage = extend(facts.lineage, choice.origin, generation)
    serving = holders(evidence(facts), choice.origin)
    facts = replace(
        facts,
        generation=generation,
        lineage=lineage,
        plans=(*_needed_plans(facts), (generation, plan)),
        step=choice.step,
        reported=min(facts.reported, choice.step),
        commitments=tuple(c for c in facts.commitments if alive(lineage, c.stored.generation, c.stored.step)),
        attempts=tuple(a for a in facts.attempts if alive(lineage, a.generation, a.step)),
        snapshots=None,
        saving=None,
        moving=planned.moved,
        uncovered=facts.uncovered + (facts.generation > 0 and not isinstance(choice.origin, Live | Mixed)),
        reconfigurations=facts.reconfigurations + (facts.generation > 0),
    )
    phase = Forming(plan=plan, origin=choice.origin, holders=serving, since=at, paused=paused)
    return Outcome(
        state=State(facts=facts, phase=phase),
        commands=(form_command(facts, phase),),
        reason=f"generation {generation} is formed as {plan}, {choice.reason}; planned: {planned.reason}",
        planned=planned.reason,
    )


def form_command(facts: Facts, phase: Forming) -> Form:
    origin = phase.origin
    return Form(
        generation=facts.generation,
        plan=phase.plan,
        origin=phase.origin,
        lineage=facts.lineage,
        holders=phase.holders,
        replayed=dict(facts.plans)[origin.generation]
        if isinstance(origin, Mixed) and origin.replays
        else None,
        by_module=facts.by_module,
    )


def _needed_plans(facts: Facts) -> tuple[tuple[int, Plan], ...]:
    """Plans of the last generations, and of older ones that somebody still holds or saves state of."""
    needed = {h.generation for _, held in facts.local_states for h in held}
    needed |= {attempt.generation for attempt in facts.attempts}
    needed |= {generation for generation, _ in facts.plans[-PLANS_KEPT:]}
    return tuple(entry for entry in facts.plans if entry[0] in needed)
