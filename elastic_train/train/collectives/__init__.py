"""Process groups that break and form again within one process, and positions in their mesh."""
