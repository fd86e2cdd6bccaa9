"""The driver process: starts a run, follows its controller, shows progress and returns the result."""
