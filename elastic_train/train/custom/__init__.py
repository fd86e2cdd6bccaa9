"""A loop that the user writes: declared once per generation, then entered with its state in place."""
