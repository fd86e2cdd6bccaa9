"""What every importer returns: a manifest of rows in foreign files, and a document, both checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.commit import check_aliases, tensors_of
from elastic_train.checkpoint.document import Json, StateFile
from elastic_train.checkpoint.fetch import Files
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.resharding import recorded
from elastic_train.errors import FragmentMissing
from elastic_train.geometry.coverage import untiled
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Imported:
    """The parts of an open checkpoint."""

    files: Files
    manifest: Manifest
    state: StateFile


def imported(
    store: Store,
    directory: str,
    rows: Iterable[Row],
    document: Mapping[str, Json],
    *,
    aliases: Mapping[str, str],
    options: Options | None = None,
) -> Imported:
    """Join the rows, if they tile every tensor; files are relative to `directory`, "" for the root."""
    files = Files(store, directory, options=options)
    manifest = Manifest.of(sorted(rows, key=lambda r: (r.tensor, r.state)), url=files.url)
    problem = untiled(manifest.fragments)
    if problem is not None:
        raise FragmentMissing(
            url=files.url, problem=f"{problem}. A file is missing, or is not of this checkpoint."
        )
    check_aliases(manifest, aliases, url=files.url)
    reported = recorded(document, tensors_of(manifest), url=files.url)
    return Imported(files=files, manifest=manifest, state=StateFile(document=reported, aliases=aliases))
