"""Training loops of the user: declared once per generation, then entered with their state restored."""
