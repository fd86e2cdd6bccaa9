"""The command line: `elastic-train`. Verbs that only read load neither Ray nor torch."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `elastic-train` command."""
    from elastic_train.cli.app import app
    from elastic_train.cli.output import tell_waits

    tell_waits()
    app()
