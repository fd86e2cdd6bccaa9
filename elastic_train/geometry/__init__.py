"""Geometry of sharded tensors: boxes, layouts, coverage, and which bytes go where.

Everything anyone holds of a logical tensor is a *fragment*: a box in the tensor's own coordinates. A million
fragments are a table: columns of numpy integers, never an object each. No torch, no I/O, no clock.
Invariant: *fragments tile the tensor*.
"""
