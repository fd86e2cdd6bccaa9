"""A device that is not the CPU, for machines without one: what runs here touches no memory of the host.

It computes with the CPU's kernels, in memory that the host may not touch, on queues that run beside the
host. What holds for it holds for every accelerator that torch knows; speed and numbers of a GPU it hasn't.
"""
