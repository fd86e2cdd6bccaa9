"""Performs fault schedules on real processes."""
