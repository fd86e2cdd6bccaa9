"""Bytes at a URL: read, write atomically, create once; a commit log and a lease on top.

fsspec is the only technology here. Nothing below trusts that a file exists because its name does: a name
appears only when all of its bytes are durable.
"""
