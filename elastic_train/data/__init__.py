"""Which sample is trained when: a pure function of the step, and the sources that the samples come from.

Order knows nothing of ranks. Invariant: *each sample exactly once* per epoch.
"""
