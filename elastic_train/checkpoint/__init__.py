"""Bytes of a checkpoint: written in parts, visible only when all of them are durable and verified.

A checkpoint says nothing about ranks or meshes. Fragments tile each tensor; any plan reads any other's. No
pickle. Invariant: *at every instant one loadable checkpoint exists* once the first was committed.
"""
