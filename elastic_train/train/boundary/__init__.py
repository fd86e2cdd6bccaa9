"""What crosses a pipeline's stage boundaries is kept by its sender: a lost stage alone can be replayed.

Sender-side logging and parallel replay as in SWIFT (arXiv 2302.06173); here random numbers are keyed by step
and micro-batch, and gradients are summed in the order of micro-batch ids, so that a replay is bitwise.
"""
