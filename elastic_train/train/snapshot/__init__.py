"""Copies of live tensors for the peer and storage tiers: what is copied, in which order, on which queue."""
