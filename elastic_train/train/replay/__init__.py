"""Runs the steps of a lost pipeline stage again from its neighbours' logs."""
