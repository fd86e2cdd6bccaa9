"""A rank's shards: as fragments, as scalars of a document, kept for others, compared, and filled."""
