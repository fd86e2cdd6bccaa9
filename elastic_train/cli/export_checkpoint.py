"""`ckpt export`: write a checkpoint in another system's format, without Ray or torch."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.checkpoint.exporters.dcp import export_dcp
from elastic_train.checkpoint.exporters.hf import DTYPES, export_hf
from elastic_train.checkpoint.exporters.ucp import export_ucp
from elastic_train.checkpoint.language.describe import describe
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.checkpoint.language.translated_view import as_theirs
from elastic_train.cli.option_files import settings_of, specification
from elastic_train.cli.output import say, say_json, say_line
from elastic_train.cli.progress import reading, stored_bytes
from elastic_train.cli.show_checkpoints import opened
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import bytes_text
from elastic_train.storage.fsspec_store import open_store

FORMS = ("hf", "ucp", "dcp")


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
    settings = None if config is None else settings_of(config)
    source: Readable = opened(run, step, allow_roots=allow_roots)
    if spec is not None:
        mapped = as_theirs(source, specification(spec))
        source = mapped
        if show:
            said = describe(mapped.resolved)
            say_json({"map": said.splitlines()}) if as_json else say(said)
            return
    store = open_store(out)
    with reading("exported", source, total=None if to == "hf" else stored_bytes(source)):
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
