"""Sample order as a pure function of the step, and the data sources that samples come from.

Order knows nothing of ranks. Invariant: *each sample exactly once* per epoch.
"""
