"""Validate a checkpoint's manifest, state and files before anything uses them.

Every manifest, index, state file and file name passes here once, on its way in. What comes out is sound:
sizes can't overflow, boxes tile their tensors, checksums are complete, names lead nowhere else. What isn't is
a typed error that names the object and a remedy. Nothing here allocates more than its input is large.
"""
