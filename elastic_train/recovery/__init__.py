"""Recovery decisions: what survived a failure and the cheapest way back, as pure functions.

Evidence is keyed by (lineage, step): only local states of the lineage that a generation continues count, and
one restore never mixes steps. The chooser returns an origin and the sentence that explains it.
"""
