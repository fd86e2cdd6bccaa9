"""Everything that touches a tensor: one process's part of a group, its step, and its fragments.

torch is the only technology here; the same code runs in a Ray actor and in a bare process. The plan decides
who computes what, never what is computed.
"""
