"""Decide when to form a group, from which workers, under which plan and from which source of state.

A first group forms when every worker that was started is up, or when enough are up and nobody came for the
join window. After a failure or a pause state is held in memory and nobody waits for a cold start: whoever is
ready takes a rank, others join later.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control import exceeded_plans, preparation
from elastic_train.control.commands import AskPeers, Command, Form, Go, Save, StopWorker
from elastic_train.control.ending import end
from elastic_train.control.events import GroupReady, PeersReported
from elastic_train.control.keep_ranks import keep_places
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
from elastic_train.control.storage_trouble import blocked, over, rests, unblocked
from elastic_train.control.switch_cost import expected_s, expected_step_s
from elastic_train.control.unanswered_commits import read_log
from elastic_train.planner.plan import Infeasible, Plan, counted
from elastic_train.planner.question import Planned, Question
from elastic_train.recovery.choose_recovery import Choice, Evidence, Unrecoverable, choose, holders, votes
from elastic_train.recovery.evidence import Live, Mixed, Stored, checkpoint_of
from elastic_train.recovery.lineage import alive, extend
from elastic_train.recovery.replayable_steps import logged

PLANS_KEPT = 4


def best_plan(question: Question, policy: Policy) -> Planned | Infeasible:
    """The planner's choice, within the bounds that the user set."""
    workers = len(question.worker_slots)
    if workers < policy.min_workers:
        are = counted(workers, "worker", ("is", "are"))
        return Infeasible(reason=f"{are} ready, at least {policy.min_workers} are needed")
    planned = policy.plan(question)
    if isinstance(planned, Planned) and planned.plan.world_size < policy.min_workers:
        plan = planned.plan
        return Infeasible(
            reason=f"of {counted(workers, 'worker')} the planner can use {plan.world_size} ({plan}), "
            f"at least {policy.min_workers} are needed"
        )
    return planned


def evidence(facts: Facts) -> Evidence:
    survived, suspect, last = facts.survived, facts.survived.suspect, last_plan(facts)
    seated = set(last.workers) if last is not None else set[str]()
    free = {slot.node for slot in worker_slots(facts, last) if slot.worker not in seated}
    snapshots = [s for s in survived.snapshots or () if not _is_suspect(suspect, s.generation, s.step)]
    found = Evidence(
        lineage=facts.lineage.chain,
        plans=dict(facts.lineage.plans),
        local_states=survived.local_states,
        step=facts.lineage.step,
        seen=facts.lineage.seen,
        stored=_sound(facts),
        ever_stored=facts.saves.ever_stored and (suspect is None or suspect[1] > 0),
        # the first of equals is read
        snapshots=tuple(sorted(snapshots, key=lambda s: s.peer_store not in free)),
    )
    plans = {generation: plan for generation, plan in facts.lineage.plans if generation > survived.unreplayed}
    return replace(
        found,
        logs=logged(dict(survived.logs), plans, votes(found)),
        costs=replace(found.costs, replayers=len(worker_slots(facts, last))),
    )


def _is_suspect(suspect: tuple[int, int] | None, generation: int, step: int) -> bool:
    """Whether what was saved may hold what turned out to be corrupt later."""
    return suspect is not None and generation <= suspect[0] and step > suspect[1]


def _sound(facts: Facts) -> Stored | None:
    """The newest checkpoint that isn't suspect."""
    stored, suspect = facts.saves.stored, facts.survived.suspect
    if stored is None or not _is_suspect(suspect, stored.generation, stored.step):
        return stored
    known = [c.stored for c in facts.saves.commitments]
    older = [s for s in known if not _is_suspect(suspect, s.generation, s.step)]
    return older[-1] if older else None


def try_form(state: State, policy: Policy, at: float) -> Outcome:
    """Form a group if it is time to."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Waiting)
    candidates, coming = present(facts.membership), starting(facts.membership)
    if len(candidates) + len(coming) < policy.min_workers:
        return _too_few(state, policy, at)
    if not _complete(phase, candidates, policy, at, coming=bool(coming)):
        return Outcome(state=state)
    made = phase.prepared
    if made is not None and preparation.holds(made, facts):
        planned = Planned(plan=made.plan, reason=made.reason, moved=made.moved, step_s=made.step_s)
    else:
        made, planned = None, best_plan(to_form(facts, held(facts), policy, at), policy)
    if isinstance(planned, Infeasible) and facts.membership.evicted:
        return _too_few(state, policy, at)
    if isinstance(planned, Infeasible) and facts.failures.exceeded and not coming:
        why = f"{exceeded_plans.said(facts.failures.exceeded)}, and no plan needs less: {planned.reason}"
        return end(state, "infrastructure", why)
    if isinstance(planned, Infeasible):
        if planned.reason == phase.problem:
            return Outcome(state=state)
        return Outcome(
            state=replace(state, phase=replace(phase, problem=planned.reason)),
            reason=f"no plan yet: {planned.reason}",
        )
    choice = choose(evidence(facts))
    if policy.peers and facts.lineage.generation and _peers_may_know_more(facts, choice):
        return _ask_peers(state, at)
    if facts.saves.unsure and not (isinstance(choice, Choice) and isinstance(choice.origin, Live | Mixed)):
        return read_log(state, at)
    if facts.stopping is not None and _not_worth_saving(facts, choice):
        return end_stopped(state, f"{facts.stopping}; nothing newer could be recovered: {choice.reason}")
    if isinstance(choice, Unrecoverable):
        return end(state, "checkpoint", choice.reason)
    if _better_on_its_way(facts, choice):
        return Outcome(state=state)
    if checkpoint_of(choice.origin) is not None and rests(facts.saves, at):
        saves = blocked(facts.saves, at)
        return Outcome(
            state=state if saves is facts.saves else replace(state, facts=replace(facts, saves=saves))
        )
    if made is not None and isinstance(choice.origin, Live):
        return _form(state, planned, choice, at, phase.paused, prepared=made.number)
    plan = keep_places(planned.plan, last_plan(facts), at_hand(facts))
    return _form(state, replace(planned, plan=plan), choice, at, phase.paused)


def _too_few(state: State, policy: Policy, at: float) -> Outcome:
    """Slow nodes that were left are better than none; a run that only has to stop waits for no machine."""
    facts = state.facts
    if facts.membership.evicted:
        slow = ", ".join(facts.membership.evicted)
        facts = replace(facts, membership=keep_all_nodes(facts.membership))
        kept = Outcome(
            state=replace(state, facts=facts),
            reason=f"too few workers without {slow}, which is slow: it is kept",
        )
        return kept.then(lambda s: try_form(s, policy, at))
    if facts.stopping is not None and not any(n.drain_by is None for n in facts.membership.nodes):
        return end_stopped(
            state, f"{facts.stopping}; there are no nodes to recover step {facts.lineage.step} on"
        )
    return Outcome(state=state)


def _not_worth_saving(facts: Facts, choice: Choice | Unrecoverable) -> bool:
    stored = facts.saves.stored.step if facts.saves.stored is not None else 0
    return isinstance(choice, Unrecoverable) or choice.step <= stored


def peers_reported(state: State, event: PeersReported) -> Outcome:
    """What peer memory holds, where survivors alone don't hold the newest step."""
    facts = state.facts
    if not facts.survived.asking:
        return Outcome(state=state, reason="nobody waits for what the peer stores hold")
    steps = sorted({s.step for s in event.snapshots})
    held = f"steps {', '.join(map(str, steps))}" if steps else "nothing"
    survived = replace(facts.survived, snapshots=event.snapshots, asking=False)
    return Outcome(
        state=replace(state, facts=replace(facts, survived=survived)),
        reason=f"peer memory holds {held}",
    )


def group_ready(state: State, event: GroupReady, policy: Policy) -> Outcome:
    """Every rank holds its verified state: train. Leaving holders have done their part."""
    facts, phase, at = state.facts, state.phase, event.at
    if not isinstance(phase, Forming):
        return Outcome(state=state, reason=f"generation {facts.lineage.generation} is known to be ready")
    leaving = draining(facts.membership)
    seated = set(phase.plan.workers)
    done = tuple(w for w in facts.membership.workers if w.node in leaving and w.name not in seated)
    gone = {w.name for w in done}
    idle = {w.name for w in facts.membership.workers} - gone - seated
    lineage, survived, saves, measured = facts.lineage, facts.survived, facts.saves, facts.measured
    saves = over(saves) if checkpoint_of(phase.origin) is not None else unblocked(saves)
    measured = replace(
        measured,
        began=at if measured.began is None else measured.began,
        transfer_s=event.transfer_s,
        formed_s=at - phase.since,
    )
    if phase.paused is not None:
        measured = replace(measured, resized=at)
    facts = replace(
        facts,
        membership=replace(
            facts.membership,
            workers=tuple(w for w in facts.membership.workers if w.name not in gone),
            evicted=(),
        ),
        lineage=lineage if event.by_module is None else replace(lineage, by_module=event.by_module),
        survived=replace(
            survived,
            local_states=tuple(h for h in survived.local_states if h[0] in idle),
            logs=tuple(h for h in survived.logs if h[0] in idle),
        ),
        saves=replace(saves, asked=at) if saves.asked is None else saves,
        measured=measured,
        failures=replace(
            facts.failures, partial=(event.generation, lineage.step + 1) if event.late else None
        ),
    )
    slow = state.facts.membership.evicted
    kept = f"; {event.computed} micro-batches of the next step are there already" if event.computed else ""
    commands: list[Command] = [Go(generation=lineage.generation)]
    commands += [
        StopWorker(worker=w.name, reason=f"node {w.node} is {'slow' if w.node in slow else 'draining'}")
        for w in done
    ]
    if lineage.step >= policy.max_steps:
        commands.append(Save(generation=lineage.generation))
    return Outcome(
        state=State(
            facts=facts, phase=Running(plan=phase.plan, since=at, final_since=at, stands=phase.paused)
        ),
        commands=tuple(commands),
        reason=f"generation {lineage.generation} trains on from step {lineage.step}: {phase.plan}{kept}",
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
    newest = isinstance(choice, Choice) and (
        isinstance(choice.origin, Live) or choice.step >= facts.lineage.step > 0
    )
    newest = newest and isinstance(choice, Choice) and checkpoint_of(choice.origin) is None
    if isinstance(choice, Choice) and isinstance(choice.origin, Mixed) and choice.origin.replays:
        newest = False  # it may have what would be replayed, or a nearer base
    return not newest and facts.survived.snapshots is None


def _ask_peers(state: State, at: float) -> Outcome:
    facts = state.facts
    if facts.survived.asking:
        return Outcome(state=state)
    survived = replace(facts.survived, asking=True, asked_at=at)
    return Outcome(
        state=replace(state, facts=replace(facts, survived=survived)),
        commands=(AskPeers(generation=facts.lineage.generation),),
        reason="survivors do not hold the newest step: the peer stores are asked",
    )


def _better_on_its_way(facts: Facts, choice: Choice) -> bool:
    """Whether a commit that was ordered would save more steps; memory never waits for storage."""
    if isinstance(choice.origin, Live | Mixed):
        return False
    return any(
        a.committing and a.step > choice.step and alive(facts.lineage.chain, a.generation, a.step)
        for a in facts.saves.attempts
    )


def _form(
    state: State, planned: Planned, choice: Choice, at: float, paused: float | None, *, prepared: int = 0
) -> Outcome:
    facts, plan = state.facts, planned.plan
    saves, before = facts.saves, facts.lineage.generation
    generation = preparation.next_generation(facts)
    chain = extend(facts.lineage.chain, choice.origin, generation)
    from_memory = isinstance(choice.origin, Live | Mixed)
    serving = holders(evidence(facts), choice.origin)
    step_s = expected_step_s(facts.measured, last_plan(facts), plan, planned.step_s)
    switch_s = expected_s(facts.measured) if paused is not None else None
    facts = replace(
        facts,
        lineage=replace(
            facts.lineage,
            generation=generation,
            chain=chain,
            plans=(*_needed_plans(facts), (generation, plan)),
            step=choice.step,
            reported=min(facts.lineage.reported, choice.step),
        ),
        saves=replace(
            saves,
            commitments=tuple(
                c for c in saves.commitments if alive(chain, c.stored.generation, c.stored.step)
            ),
            attempts=tuple(a for a in saves.attempts if alive(chain, a.generation, a.step)),
        ),
        survived=replace(facts.survived, snapshots=None),
        measured=replace(
            facts.measured,
            saving_s=None,
            moving_bytes=planned.moved,
            planned_s=planned.step_s,
            reconfigurations=facts.measured.reconfigurations + (before > 0),
        ),
        failures=replace(
            facts.failures,
            uncovered=facts.failures.uncovered + (before > 0 and not from_memory),
        ),
    )
    phase = Forming(
        plan=plan, origin=choice.origin, holders=serving, since=at, paused=paused, prepared=prepared
    )
    return Outcome(
        state=State(facts=facts, phase=phase),
        commands=(replace(form_command(facts, phase), step_s=step_s, switch_s=switch_s),),
        reason=f"generation {generation} is formed as {plan}, {choice.reason}; planned: {planned.reason}",
        planned=planned.reason,
    )


def form_command(facts: Facts, phase: Forming) -> Form:
    origin = phase.origin
    return Form(
        generation=facts.lineage.generation,
        plan=phase.plan,
        origin=phase.origin,
        lineage=facts.lineage.chain,
        holders=phase.holders,
        replayed=dict(facts.lineage.plans)[origin.generation]
        if isinstance(origin, Mixed) and origin.replays
        else None,
        by_module=facts.lineage.by_module,
        prepared=phase.prepared,
    )


def _needed_plans(facts: Facts) -> tuple[tuple[int, Plan], ...]:
    """Plans of the last generations, and of older ones that somebody still holds or saves state of."""
    needed = {h.generation for _, held in facts.survived.local_states for h in held}
    needed |= {attempt.generation for attempt in facts.saves.attempts}
    needed |= {generation for generation, _ in facts.lineage.plans[-PLANS_KEPT:]}
    return tuple(entry for entry in facts.lineage.plans if entry[0] in needed)
