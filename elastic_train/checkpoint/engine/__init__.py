"""Snapshots taken while the next step computes: bytes and threads, no tensors library, no cluster.

State is only written by the update, so it is copied between two of them, and the update waits for what is not
copied yet. Invariant: *a snapshot that is handed on is the state of one committed step*.
"""
