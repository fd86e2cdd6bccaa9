"""Models that ship with the library: a small Llama-like language model, in sizes by one dial."""
