"""The peer store actor: one per node, keeps snapshots in shared memory and writes checkpoints."""
