"""`ckpt diff`: compare two checkpoints, of this or other systems."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cli.exit_codes import FINISHED, USER_ERROR
from elastic_train.cli.option_files import specification
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cli.progress import reading
from elastic_train.cli.run_paths import absence_told


def diff_checkpoints(
    a: str, b: str, *, spec: str | None, as_json: bool, allow_roots: Sequence[str] = ()
) -> int:
    """Prints the differences; 0 if there are none, else 1."""
    with absence_told(a, b):
        one, theirs = (open_checkpoint(url, allow_roots=allow_roots) for url in (a, b))
    other = as_ours(theirs, specification(spec)) if spec else theirs
    with reading("compared", one, theirs, total=None):
        if as_json:
            every = [{"where": d.where, "what": d.what} for d in differences(one, other)]
            say_json({"differences": every})
            return USER_ERROR if every else FINISHED
        found = 0
        for difference in differences(one, other):
            say_line(difference)
            found += 1
    say(f"{found} differences" if found else "no differences")
    return USER_ERROR if found else FINISHED
