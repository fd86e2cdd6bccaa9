"""Bring what other libraries' users have: law: a package each, which imports this library's public names and
that library's, and is loaded by nobody who doesn't ask for it."""
