"""Checkpoints in the forms of other systems, written block by block: memory doesn't grow with the model.

What is read may be a checkpoint of any origin, seen through a specification. The file that makes the result
complete is written last, and what is there already is never written over.
"""
