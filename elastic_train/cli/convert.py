"""`ckpt export | import | diff | plan | gc`: checkpoints of this and other systems, without Ray or torch."""

from __future__ import annotations

import json
import platform
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import DTYPES, export_hf
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.describe import describe
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.specification import IDENTITY, Spec
from elastic_train.checkpoint.language.translated_view import as_ours, as_theirs
from elastic_train.checkpoint.read_plan import read_plan, sharded
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.cli.checkpoints import opened
from elastic_train.cli.exits import FINISHED, USER_ERROR
from elastic_train.cli.places import absence_told, run_there
from elastic_train.cli.say import say, say_json, say_line
from elastic_train.errors import ConfigError, LeaseHeld, TensorMismatch
from elastic_train.observe.text_columns import columns
from elastic_train.planner.plan import AXES, bytes_text
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.lease import Lease

FORMS = ("hf", "ucp", "dcp")
LEASE_S = 10.0
HELD = (
    "It deletes by itself what it doesn't need. Stop it with `elastic-train stop`; if it is dead, `--wait` "
    "takes the run over once its lease has passed without a sign of life."
)
DATA_AXES = {"dp_shard", "dp_replicate"}


def export_checkpoint(
    run: str,
    out: str,
    *,
    to: str,
    spec: str | None,
    step: int | None,
    dtype: str | None,
    config: str | None,
    show: bool,
    as_json: bool,
    allow_roots: Sequence[str] = (),
) -> None:
    if to not in FORMS:
        raise ConfigError(field="--to", problem=f"{to!r} is none of {', '.join(FORMS)}.")
    if to != "hf" and (dtype or config):
        raise ConfigError(field="--dtype", problem="and --config are for `--to hf`; states keep their bits.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(field="--dtype", problem=f"{dtype!r} is none of {', '.join(DTYPES)}.")
    settings = None if config is None else _settings(config)
    source: Readable = opened(run, step, allow_roots=allow_roots)
    if spec is not None:
        mapped = as_theirs(source, _spec(spec))
        source = mapped
        if show:
            say(describe(mapped.resolved))
            return
    store = open_store(out)
    match to:
        case "hf":
            done = export_hf(source, store, dtype=DTYPES[dtype] if dtype else None, config=settings)
        case "ucp":
            done = export_ucp(source, store)
        case _:
            done = export_dcp(source, store)
    if as_json:
        say_json({"out": out, "files": list(done.files), "bytes": done.bytes})
    else:
        say_line(f"{len(done.files)} files, {bytes_text(done.bytes)} in {out}")


def import_checkpoint(
    source: str,
    run: str,
    *,
    spec: str | None,
    copy: bool,
    show: bool,
    as_json: bool = False,
    names: str | None = None,
    allow_roots: Sequence[str] = (),
) -> None:
    with absence_told(source):
        mapped = as_ours(_with_names(source, names, allow_roots), _spec(spec))
    if show:
        say(describe(mapped.resolved))
        return
    stored = adopt(mapped, open_store(run), holder=_holder(), copy=copy)
    count = len({tensor for tensor, _ in mapped.tensors})
    how = "copied into" if copy else "indexed in place for"
    foreign = mapped.document.get("foreign") or {}
    missing, assumed = list(foreign.get("not_restored", ())), list(foreign.get("assumed", ()))
    if as_json:
        reported = {"source": source, "run": run, "copied": copy, "step": stored.step, "tensors": count}
        say_json({**reported, "not_restored": missing, "assumed": assumed})
        return
    say_line(f"{count} tensors of {source} {how} {run}: step {stored.step}")
    for lost in missing:
        say_line(f"not restored: {lost}")
    for taken in assumed:
        say_line(f"assumed: {taken}")


def _with_names(source: str, file: str | None, allow_roots: Sequence[str]) -> Checkpoint:
    """The checkpoint, with names for an optimizer that only numbers its parameters: those of a file, or those
    of the model that a Hugging Face configuration describes.
    """
    if file is not None:
        return open_checkpoint(source, names=_names(file), allow_roots=allow_roots)
    found = open_checkpoint(source, allow_roots=allow_roots)
    foreign = found.document.get("foreign") or {}
    config = foreign.get("config")
    if not isinstance(config, dict) or not any("--names" in lost for lost in foreign.get("not_restored", ())):
        return found
    try:
        from elastic_train.models.parameter_names import parameter_names
    except ImportError:  # transformers isn't here to ask
        return found
    names = parameter_names(config, most=len(found))
    if names is None:
        return found
    try:
        return open_checkpoint(source, names=names, allow_roots=allow_roots)
    except TensorMismatch:  # the weights are another model's than the configuration's
        return found


def _names(path: str) -> list[str]:
    """One name a line, or a JSON list."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--names", problem=f"there is no file {path}.")
    text = _text(file, "--names")
    if not text.lstrip().startswith("["):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(field="--names", problem=f"{path} is no JSON list ({error}).") from error
    if not all(isinstance(name, str) for name in found):
        raise ConfigError(field="--names", problem=f"{path} has an entry that is no name.")
    return found


def diff_checkpoints(
    a: str, b: str, *, spec: str | None, as_json: bool, allow_roots: Sequence[str] = ()
) -> int:
    """Prints the differences; 0 if there are none, else 1."""
    with absence_told(a, b):
        one, theirs = (open_checkpoint(url, allow_roots=allow_roots) for url in (a, b))
    other = as_ours(theirs, _spec(spec)) if spec else theirs
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


def show_read_plan(
    run: str, step: int | None, *, to: str, job: str | None, arguments: Sequence[str], as_json: bool
) -> None:
    checkpoint = opened(run, step)
    axes = _axes(to)
    if job is not None:
        from elastic_train.cli.show_plan import held_by_ranks

        ranks = held_by_ranks(job, arguments, axes)
    elif axes.keys() <= DATA_AXES:
        ranks = sharded(checkpoint, axes.get("dp_shard", 1))
    else:
        raise ConfigError(
            field="--to",
            problem=f"{', '.join(sorted(axes.keys() - DATA_AXES))} cut a model in a way that its job knows.",
            remedy="Name it: --job JOB, and its options after it.",
        )
    plan = read_plan(checkpoint, ranks)
    if as_json:
        ranks = [{n: getattr(r, n) for n in r.__dataclass_fields__} for r in plan.ranks]
        say_json({"amplification": plan.amplification, "ranks": ranks})
        return
    table = [("rank", "state", "read", "ranges", "peak memory")]
    table += [
        (
            str(r.rank),
            bytes_text(r.state_bytes),
            bytes_text(r.read_bytes),
            str(r.reads),
            bytes_text(r.peak_bytes),
        )
        for r in plan.ranks
    ]
    say(columns(table))
    say(f"read amplification {plan.amplification:.3f}")


def collect_garbage(
    run: str, *, dry_run: bool, wait: bool = False, unpin: str | None = None, as_json: bool = False
) -> None:
    """A run that is held deletes by itself what it doesn't need, and may be writing what nobody refers to
    yet: it is left alone. With `wait` it is taken over where its holder shows no life for its lease.
    """
    directory = run_there(run)
    keep = [c.slot for c in directory.commits()]
    if unpin is not None and not dry_run and not directory.unpin(unpin):
        raise ConfigError(field="--unpin", problem=f"{unpin} reads nothing of {run}.")
    _, sizes = directory.unneeded(keep)
    if not dry_run and (sizes or directory.leftovers()):
        lease = Lease(directory.store, holder=_holder(), lease_s=LEASE_S)
        held = lease.look()
        if held is not None and not held.released and not wait:
            raise LeaseHeld(run=run, holder=held.holder, age_s=0.0, detail=HELD)
        lease.acquire()
        term = directory.begin_term(_holder())
        lease.renew(term)
        try:
            gone = directory.prune(keep, term=term).directories
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


def _spec(path: str | None) -> Spec:
    if path is None:
        return IDENTITY
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--spec", problem=f"there is no file {path}.")
    return parse(_text(file, "--spec"), origin=file.name)


def _settings(path: str) -> dict[str, Any]:
    """What becomes config.json: an object of JSON, read before anything is written."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(field="--config", problem=f"there is no file {path}.")
    try:
        settings = json.loads(_text(file, "--config"))
    except ValueError as error:
        raise ConfigError(field="--config", problem=f"{path} is no JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise ConfigError(field="--config", problem=f"{path} holds no JSON object.")
    return cast("dict[str, Any]", settings)


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field=field, problem=f"{file} can't be read: {error}.") from error


def _axes(text: str) -> dict[str, int]:
    """`pp=2,dp_shard=4` as sizes by axis."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in AXES or not number.isdecimal() or not int(number):
            raise ConfigError(
                field="--to", problem=f"{part!r} isn't AXIS=N.", remedy=f"The axes are {', '.join(AXES)}."
            )
        axes[name] = int(number)
    return axes


def _holder() -> str:
    return f"elastic-train ckpt on {platform.node()}, {uuid.uuid4().hex[:8]}"
