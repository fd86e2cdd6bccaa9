"""Real parts for tests, shipped: the simulator with virtual time, process pools, fault-injecting stores.

A fake is a full implementation of its protocol and passes the same contract suite as the real part.
"""
