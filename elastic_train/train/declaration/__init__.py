"""Turn a user's training loop into a task: collect its models, optimizers and data set before any step."""
