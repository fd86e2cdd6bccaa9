"""Optimizers run backwards: from the state after a step and its gradient to the state before it.

The algebra is SWIFT's update-undo (arXiv 2302.06173), for more optimizers. It is exact up to rounding, never
to the bit, so a roll forward is preferred where its gradient is kept. Where rounding has destroyed what the
step before left, undo refuses and changes nothing; it never guesses.
"""
