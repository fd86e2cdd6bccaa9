"""Checkpoints of other systems, indexed where they lie.

Opening reads headers and indices and nothing else: no tensor byte is read or copied, no pickle is executed.
Each importer turns files into rows of a manifest that point at byte ranges of those files, and a document of
scalars. What a file doesn't hold, or holds and can't be restored, is said in the document and never guessed;
what can't be read right is refused as a whole.
"""
