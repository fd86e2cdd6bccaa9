"""Whatever decides what a run does next: `(state, event, policy) -> (state, commands, reason)`.

Nothing here performs anything: no clock, no Ray, no storage, no logging. Time arrives in events. A command is
idempotent and every effect ends in an event. Words of workers are fenced by generation; facts of storage are
durable whoever wrote them. Invariant: *the journal folds to the state*.
"""
