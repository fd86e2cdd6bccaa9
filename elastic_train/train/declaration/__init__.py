"""A loop of the user's own as a task: its models, optimizers and data set, declared before any step."""
