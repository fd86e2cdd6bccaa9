"""`ckpt gc`: remove what no committed checkpoint of a run needs."""

from __future__ import annotations

from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cli.progress import progress
from elastic_train.cli.run_paths import run_there, this_command
from elastic_train.errors import ConfigError, LeaseHeld
from elastic_train.planner.plan import bytes_text
from elastic_train.storage.lease import Lease

LEASE_S = 10.0
HELD = (
    "It deletes by itself what it doesn't need. Stop it with `elastic-train stop`; if it is dead, `--wait` "
    "takes the run over once its lease has passed without a sign of life."
)


def collect_garbage(
    run: str, *, dry_run: bool, wait: bool = False, unpin: str | None = None, as_json: bool = False
) -> None:
    """A run that is held deletes by itself what it doesn't need, and may be writing what nobody refers to
    yet: it is left alone. With `wait` it is taken over where its holder shows no life for its lease.
    """
    directory = run_there(run)
    keep = [c.slot for c in directory.commits()]
    known = max(keep, default=0)  # a run that is still held may commit until it is taken over
    if unpin is not None and not dry_run and not directory.unpin(unpin):
        raise ConfigError(field="--unpin", problem=f"{unpin} reads nothing of {run}.")
    _, sizes = directory.unneeded(keep)
    if not dry_run and (sizes or directory.leftovers()):
        lease = Lease(directory.store, holder=this_command(), lease_s=LEASE_S)
        held = lease.look()
        if held is not None and not held.released and not wait:
            raise LeaseHeld(run=run, holder=held.holder, age_s=0.0, detail=HELD)
        lease.acquire()
        try:
            term = directory.begin_term(this_command())
            lease.renew(term)
            cleared: list[str] = []
            with progress("removed", lambda: len(cleared), len(sizes), text=lambda n: f"{n} directories"):
                gone = directory.prune(keep, term=term, known=known, told=cleared.append).directories
        finally:
            lease.release()
        sizes = {path: sizes.get(path, 0) for path in gone}
    pins = [(pin.holder, pin.path) for pin in directory.log.pins()]
    if as_json:
        kept = [{"run": holder, "path": path} for holder, path in pins]
        say_json({"removed": not dry_run, "bytes_by_directory": sizes, "kept_for": kept})
        return
    for holder, path in pins:
        say_line(f"kept for {holder}: {path}")
    for path, size in sizes.items():
        say_line(f"{'would remove' if dry_run else 'removed'} {path}: {bytes_text(size)}")
    say(f"{len(sizes)} directories, {bytes_text(sum(sizes.values()))}")
