"""What a member of a gang does in its own process: each function is called there with the process's state."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.config import RunSpec
from elastic_train.train.member import Member, RunEnd, StepReport
from elastic_train.train.snapshot.stopping_saver import StoppingSaver
from elastic_train.train.task import Task

State = dict[str, Any]

AFTER_THE_UPDATE = ("compare", "save", "evaluation")
"""Phases of a step that is committed already."""


def start(state: State, task: Task, spec: RunSpec) -> None:
    """A new member in this process, in place of an older one."""
    end(state)
    state["reports"], state["saved"] = [], []
    state["member"] = Member(
        task,
        spec,
        device=state["device"],
        on_step=lambda report: state.get("on_step", state["reports"].append)(report),
        saving=lambda described: StoppingSaver(
            described, lambda snapshot: state["saved"].append(_kept(snapshot))
        ),
        faults=lambda phase, step, micro: state.get("faults", _no_fault)(phase, step, micro),
    )


def _kept(snapshot: Snapshot) -> tuple[int, list[Any], Any]:
    pieces = [(p.tensor, p.state, p.dtype, p.shape, p.box, bytes(p.bytes())) for p in snapshot.pieces()]
    return snapshot.step, pieces, snapshot.document


def end(state: State) -> None:
    if "member" in state:
        state.pop("member").close()
    state.pop("faults", None)
    state.pop("on_step", None)


def call(state: State, method: str, *args: Any) -> Any:
    """Call a method of the member, or of a part of it: "held.read"."""
    return attrgetter(method)(state["member"])(*args)


def take(state: State, name: str) -> Any:
    """What the member left under a name, handed over."""
    found = list(state[name])
    state[name].clear()
    return found


def run(state: State) -> tuple[RunEnd | None, str, list[StepReport]]:
    """Run until an end or an error; which, as text, and the reports."""
    outcome, error = None, ""
    try:
        outcome = state["member"].run()
    except Exception as raised:  # noqa: BLE001 - handed to the test
        error = f"{type(raised).__name__}: {raised}"
    return outcome, error, take(state, "reports")


def _no_fault(phase: str, step: int, micro_batch: int) -> None:
    return None


def stand_at(state: State, phase: str, step: int, number: int) -> None:
    """Stand still at a phase of a step, once, from micro-batch `number` on, until the group is broken."""
    stands = state["stands"] = threading.Event()

    def fault(now: str, at: int, micro_batch: int) -> None:
        if (now, at) == (phase, step) and micro_batch >= number and not stands.is_set():
            stands.set()
            state["member"]._entry.group._broken.wait()

    state["faults"] = fault


def stands(state: State) -> bool:
    return state["stands"].is_set()


def has_come_to(state: State, phase: str, step: int) -> bool:
    """Whether the member runs a step, or a later one, and has reported the one before; of that step itself
    where the phase comes after its update.
    """
    now = state["member"].progress()
    if now.phase in ("forming", "settled") or now.step != step:
        return now.step > step and now.phase not in ("forming", "settled")
    return phase not in AFTER_THE_UPDATE or now.phase in AFTER_THE_UPDATE


def set_first_step(
    state: State, late: frozenset[int], computed: dict[int, tuple[int, ...]], continued: int
) -> None:
    """Which ranks are filled during the first step, what others have of it already, and from which
    generation all of them have it.
    """
    shards = state["member"].forming.shards
    shards.late, shards.proved, shards.computed = late, shards.rank not in late, computed
    state["member"].continued = continued


def waits_for_others(state: State, step: int) -> bool:
    """Whether the member has computed its part of a step. Sums that others began in a backward come without
    them, so that it may wait for their vote.
    """
    now = state["member"].progress()
    return now.step == step and now.phase in ("reduce", "vote")


def abort(state: State, generation: int) -> None:
    state["member"].abort(generation)


def ask_for_pause_at(state: State, at: int) -> None:
    """From now on ask for a pause in the forward of a step."""

    def fault(phase: str, step: int, micro_batch: int) -> None:
        if phase == "forward" and step == at:
            state["member"].request(pause=True)

    state["faults"] = fault
