"""The controller actor: folds events, performs commands, watches nodes and workers, commits."""
