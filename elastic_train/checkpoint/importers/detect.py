"""Detect which system wrote a checkpoint, by the names of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from elastic_train.checkpoint.importers.dcp import METADATA, open_dcp
from elastic_train.checkpoint.importers.deepspeed import open_deepspeed
from elastic_train.checkpoint.importers.full_pt import open_full
from elastic_train.checkpoint.importers.imported import Imported
from elastic_train.checkpoint.importers.index_cache import cached
from elastic_train.checkpoint.importers.megatron import directory, is_megatron, open_megatron
from elastic_train.checkpoint.importers.openable import is_model, lone_model
from elastic_train.checkpoint.importers.safetensors_hf import is_hugging_face, open_hugging_face
from elastic_train.checkpoint.importers.ucp import open_universal
from elastic_train.checkpoint.importers.weight_files import SAFE, STATES
from elastic_train.checkpoint.importers.zip_index import LEGACY
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, NoCheckpoint
from elastic_train.storage.fsspec_store import Options, open_store
from elastic_train.storage.store import Store

Opener = Callable[[Store, str, Options | None], Imported]
Names = Sequence[str] | None
"""The optimizer's parameters in its order, for checkpoints that have only numbers."""

SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
"""Directories in which Accelerate and Trainer keep the shards of a model and of its optimizer under FSDP."""
ORBAX = ("_CHECKPOINT_METADATA", "manifest.ocdbt")
_TAG = re.compile(r"[^/\0]+")


def import_checkpoint(url: str, *, options: Options | None = None, names: Names = None) -> Imported | None:
    """Index the checkpoint of another system that is at a URL, None where there is none.

    The URL is a file, a checkpoint's directory, or a directory with a file that names the latest one.
    Raises NoCheckpoint where a file names one that isn't there, or where a part of one is named.
    """
    try:
        return cached(url, names, lambda cache: _import(url, options, names, cache.store))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatUnsupported(
            url=url,
            problem=f"its files are of a known system and not built as that builds them ({error!r}). If "
            "that system can load it, please report what wrote it.",
        ) from error


def is_file(url: str, *, options: Options | None = None) -> bool:
    """Whether the URL names a file; no run is one."""
    store, name = _beside(url, options)
    return name not in ("", ".", "..") and store.exists(name)


def _import(
    url: str, options: Options | None, names: Names, watched: Callable[[Store], Store]
) -> Imported | None:
    store, name = _beside(url, options)
    store = watched(store)
    if name not in ("", ".", "..") and store.exists(name):
        opener = _opener_of_file(store, name, names)
        return opener(store, name, options) if opener else None
    store = watched(open_store(url, options=options))
    for pointer in ("latest", "latest_universal"):
        tag = _tag(store, pointer) if store.exists(pointer) else None
        if tag is not None:
            opener = _opener(store, f"{tag}/", names)
            if opener is None:
                problem = (
                    f"{pointer} names {tag!r}, where no checkpoint is. Open one of its other directories."
                )
                raise NoCheckpoint(url=url, problem=problem)
            return opener(store, tag, options)
    iteration = directory(store)
    if iteration is not None and (opener := _opener(store, f"{iteration}/", names)) is not None:
        return opener(store, iteration, options)
    opener = _opener(store, "", names)
    if opener is not None:
        return opener(store, "", options)
    if any(store.exists(mark) for mark in ORBAX):
        raise FormatUnsupported(
            url=url,
            problem="it is Orbax's, whose arrays are compressed chunks: no bytes of a file are a tensor's. "
            "Load it with Orbax and save it with safetensors, or as a torch.distributed checkpoint.",
        )
    lone = lone_model(store)
    if lone is not None:
        return open_full(store, lone, options, names=names)
    return None


def _opener_of_file(store: Store, name: str, names: Names) -> Opener | None:
    """What reads a file, by its name or its first bytes."""
    if name.endswith(SAFE):
        return open_hugging_face
    if STATES.fullmatch(name):
        raise NoCheckpoint(
            url=f"{store.url}/{name}",
            problem="it is kept beside a model's weights. Open the directory it is in.",
        )
    head = store.read(name, 0, min(store.size(name), 16))
    if is_model(name) or head.startswith((b"PK\3\4", LEGACY)):
        return partial(open_full, names=names)
    return None


def _opener(store: Store, at: str, names: Names) -> Opener | None:
    """What reads the directory: names that must be there are tried, and only if none is, it is listed."""
    if store.exists(f"{at}zero/optimizer_state.pt"):
        return open_universal
    marks = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    rest = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if any(store.exists(at + mark) for mark in (*marks, *rest)):
        return open_deepspeed
    if store.exists(at + METADATA):
        return open_megatron if is_megatron(store, at) else partial(open_dcp, names=names)
    parts = [part for part in SHARDED if store.exists(f"{at}{part}/{METADATA}")]
    if SHARDED[0] in parts:
        return partial(open_dcp, names=names, parts=tuple(parts))
    return partial(open_hugging_face, names=names) if is_hugging_face(store, at.rstrip("/")) else None


def _beside(url: str, options: Options | None) -> tuple[Store, str]:
    """The store that a file would be in, and its name there."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if parent.endswith(":/") or parent.endswith(":"):  # nothing but a scheme and a name
        return open_store(url, options=options), ""
    return open_store(parent or ("/" if url.startswith("/") else "."), options=options), name


def _tag(store: Store, pointer: str) -> str:
    data = store.read(pointer, 0, min(store.size(pointer), 4097))
    tag = data.decode(errors="replace").strip()
    if len(data) > 4096 or not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise ChecksumMismatch(
            url=f"{store.url}/{pointer}",
            problem="it names no directory beside it. Open the directory itself.",
        )
    return tag
