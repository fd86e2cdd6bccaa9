"""One optimizer step from its micro-batches to its vote and update, and the loop over steps."""
