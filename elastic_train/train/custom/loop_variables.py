"""Plain variables that a loop carries from one turn to the next, and whether training depends on them.

Found in the code of the loop itself, before its first step: what is there before a `for` loop, what its body
reads before it writes, and writes. Sums and lists that come to nothing but what is printed, logged or
reported are told apart from what a loss, a rate or a decision is computed from.
"""

from __future__ import annotations

import dis
import itertools
from types import CodeType, FrameType

_PLAIN = (bool, int, float, complex, str)
_TELLS = frozenset(
    {"print", "log", "info", "debug", "warning", "error", "write", "add_scalar", "add_scalars", "report"}
    | {"set_postfix", "set_description", "append", "extend", "update", "add", "measure", "clear", "sort"}
)
"""Calls, as statements of their own, that train nothing."""

_RATES = frozenset({"lr", "weight_decay", "momentum", "betas", "eps", "dampening"})

Statement = list[dis.Instruction]


def carried(frame: FrameType) -> tuple[str, ...]:
    """Names of plain values, where `frame` stands at the head of a `for` loop; none where it does not."""
    plain = {name for name, value in frame.f_locals.items() if value is None or isinstance(value, _PLAIN)}
    body = body_of(frame) or []
    stored = {name for one in body for kind, name in uses_of(one) if kind == "STORE"}
    return tuple(sorted(name for name in plain & stored if read_first(body, name)))


def body_of(frame: FrameType) -> list[dis.Instruction] | None:
    """The instructions of the `for` loop whose head the frame is at."""
    instructions = list(dis.get_instructions(frame.f_code))
    head = next((n for n, one in enumerate(instructions) if one.offset == frame.f_lasti), None)
    if head is None or instructions[head].opname != "FOR_ITER":
        return None
    end = instructions[head].argval
    return [one for one in instructions[head + 1 :] if one.offset < end]


def repeated(frame: FrameType) -> bool:
    """Whether a loop comes back to the place at which the frame is."""
    at = frame.f_lasti
    return any(
        one.argval < at < one.offset
        for one in dis.get_instructions(frame.f_code)
        if "JUMP_BACKWARD" in one.opname and not one.opname.endswith("NO_INTERRUPT")
    )


def paired(frame: FrameType) -> set[str]:
    """Lists that are made for each step, to which passes over the batch append, and which are
    read by `zip(batch, list)` alone: each micro-batch gets back what it gave, whatever else a rank has."""
    instructions = list(dis.get_instructions(frame.f_code))
    start = frame.f_lasti
    around = [i for i in instructions if i.opname == "FOR_ITER" and i.offset < start < i.argval]
    if not around:
        return set()
    ours = {n: v for n, v in frame.f_locals.items() if type(v).__module__.startswith("elastic_train.")}
    batches = {name for name, value in ours.items() if hasattr(value, "__iter__")}
    ahead = [one for one in instructions if around[-1].offset < one.offset < start]
    made = {name for one in ahead for kind, name in uses_of(one) if kind == "STORE"}
    lists = {n for n, v in frame.f_locals.items() if isinstance(v, list) and n in made}
    for statement in _statements(frame.f_code):
        names = {name for one in statement for kind, name in uses_of(one) if kind == "LOAD"}
        pairs = "zip" in _loaded(statement) and any(one.opname == "FOR_ITER" for one in statement)
        if pairs and batches & names:
            continue
        for one, following in itertools.pairwise(statement):
            if following.argval != "append":
                lists -= {name for kind, name in uses_of(one) if kind == "LOAD"}
    return lists


def read_first(instructions: list[dis.Instruction], name: str) -> bool:
    """Whether a variable, or an attribute as ".name", is read before it is written."""
    kinds = (kind for one in instructions for kind, found in uses_of(one) if found == name)
    return next(kinds, "") == "LOAD"


def uses_of(one: dis.Instruction) -> list[tuple[str, str]]:
    """What an instruction does to variables and attributes."""
    kinds = [part for part in one.opname.split("_") if part in ("LOAD", "STORE")]
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if "FAST" in one.opname or "DEREF" in one.opname:
        return [(kind, str(name)) for kind, name in zip(kinds, names, strict=False)]
    if one.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
        return [(kinds[0], f".{one.argval}")]
    return []


def flowing(code: CodeType, names: set[str]) -> str | None:
    """The first of the names that comes, by whatever way, to something else than what is told."""
    statements = _statements(code)
    origin = {name: name for name in names}
    while True:
        before = len(origin)
        for number, statement in enumerate(statements):
            read = [n for one in statement for kind, n in uses_of(one) if kind == "LOAD" and n in origin]
            if not read:
                continue
            stored = _stored(statement)
            if _decides(statement):
                stored = _decided(statements, number)
            elif not stored and not _tells(statement):
                stored = None
            if stored is None or _trains(statement):
                return origin[read[0]]
            for name in stored:
                origin.setdefault(name, origin[read[0]])
        if len(origin) == before:
            return None


def of_the_rank(frame: FrameType, context: object, names: frozenset[str]) -> str | None:
    """The first of some attributes of the context from which a loss is computed, by whatever way."""
    ours = {name for name, value in frame.f_locals.items() if value is context}
    statements = _statements(frame.f_code)
    origin: dict[str, str] = {}
    while True:
        before = len(origin)
        for statement in statements:
            read = [
                origin[n] for one in statement for kind, n in uses_of(one) if kind == "LOAD" and n in origin
            ]
            read += [
                str(one.argval)
                for held, one in itertools.pairwise(statement)
                if held.argval in ours and one.argval in names and one.opname.startswith("LOAD")
            ]
            if read and "backward" in _loaded(statement):
                return read[0]
            for name in _stored(statement) if read else ():
                origin.setdefault(name, read[0])
        if len(origin) == before:
            return None


def _statements(code: CodeType) -> list[Statement]:
    """Instructions up to what ends a statement, or a condition."""
    found: list[Statement] = [[]]
    ended = False
    for one in dis.get_instructions(code):
        stores = one.opname.startswith("STORE_")
        if ended and not stores:
            found.append([])
        found[-1].append(one)
        ended = stores or one.opname == "POP_TOP" or "JUMP" in one.opname or "RETURN" in one.opname
    return found


def _stored(statement: Statement) -> list[str]:
    named = [name for one in statement for kind, name in uses_of(one) if kind == "STORE"]
    held = any(one.opname == "STORE_SUBSCR" for one in statement)
    return named or ([""] if held else [])


def _loaded(statement: Statement) -> set[str]:
    return {str(one.argval) for one in statement if one.opname.startswith("LOAD")}


def _trains(statement: Statement) -> bool:
    """Whether it computes a gradient, or sets a rate."""
    sets = any(one.opname == "STORE_SUBSCR" for one in statement) and bool(_RATES & _loaded(statement))
    return sets or "backward" in _loaded(statement)


def _decides(statement: Statement) -> bool:
    return "JUMP" in statement[-1].opname and "BACKWARD" not in statement[-1].opname


def _decided(statements: list[Statement], number: int) -> list[str] | None:
    """What the branches of a condition store; None where they do something else than to store and tell."""
    target, stored = statements[number][-1].argval, list[str]()
    ends = {one.offset: one.argval for own in statements for one in own if one.opname == "FOR_ITER"}
    for statement in statements[number + 1 :]:
        last = statement[-1]
        if statement[0].offset >= target:
            break
        if last.opname == "JUMP_FORWARD" and last.argval > target:
            target = last.argval  # over the other branch
        elif last.opname == "JUMP_BACKWARD" and last.argval in ends and len(statement) == 1:
            target = max(target, ends[last.argval])  # to the next turn, past what is left of this one
        elif _stored(statement):
            stored += _stored(statement)
        elif not (_tells(statement) or _decides(statement)):
            return None
    return stored


def _tells(statement: Statement) -> bool:
    asserts = any(one.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT") for one in statement)
    return asserts or (statement[-1].opname == "POP_TOP" and bool(_loaded(statement) & _TELLS))
