"""The universal checkpoint language: what tensors mean in one system, in terms of another.

Names only select; boxes decide. Every operation is a map of boxes, so that importing is indexing and no byte
moves before it is read. One specification serves both directions; what has no inverse refuses to export.
"""
