"""The state machine of a run, as pure functions: `(state, event, policy) -> (state, commands, reason)`.

Nothing here performs anything: no clock, no Ray, no storage, no logging. Time arrives in events. A command is
idempotent and every effect ends in an event. Reports of workers are fenced by generation; facts of
storage are durable. Invariant: *the journal folds to the state*.
"""
