"""`ckpt import`: make another system's checkpoint the first one of a run, without Ray or torch."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.checkpoint.import_run import adopt
from elastic_train.checkpoint.language.describe import describe
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.cli.option_files import parameter_names_of, specification
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cli.progress import reading, stored_bytes
from elastic_train.cli.run_paths import absence_told, this_command
from elastic_train.errors import TensorMismatch
from elastic_train.storage.fsspec_store import open_store


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
        mapped = as_ours(_with_names(source, names, allow_roots), specification(spec))
    if show:
        said = describe(mapped.resolved)
        say_json({"map": said.splitlines()}) if as_json else say(said)
        return
    # What is copied is compared with its own sums before.
    with reading("read", mapped, total=2 * stored_bytes(mapped) if copy else None):
        stored = adopt(mapped, open_store(run), holder=this_command(), copy=copy)
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
        return open_checkpoint(source, names=parameter_names_of(file), allow_roots=allow_roots)
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
