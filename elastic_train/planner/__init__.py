"""Which plan to run: pure functions from hardware, model and constraints to a plan with its reason.

An infeasible request is a value (`Infeasible`), not an exception. No torch, no Ray, no clock.
"""
