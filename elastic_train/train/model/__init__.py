"""The task's model, optimizer and schedule as one process builds them, and the random choices they make."""
