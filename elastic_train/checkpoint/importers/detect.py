"""Which system wrote what is at a URL, found by the names of its files."""

from __future__ import annotations

import re
from collections.abc import Callable

from elastic_train.checkpoint.importers.dcp import METADATA, open_dcp
from elastic_train.checkpoint.importers.deepspeed import open_deepspeed
from elastic_train.checkpoint.importers.full_pt import open_full
from elastic_train.checkpoint.importers.imported import Imported
from elastic_train.checkpoint.importers.megatron import directory, is_megatron, open_megatron
from elastic_train.checkpoint.importers.safetensors_hf import is_hugging_face, open_hugging_face
from elastic_train.checkpoint.importers.ucp import open_universal
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, NoCheckpoint
from elastic_train.storage.fsspec_store import Options, open_store
from elastic_train.storage.store import Store

Opener = Callable[[Store, str, Options | None], Imported]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = ".safetensors"
_TAG = re.compile(r"[^/\0]+")


def import_checkpoint(url: str, *, options: Options | None = None) -> Imported | None:
    """Index the checkpoint of another system that is at a URL, None where there is none.

    The URL is a file, a checkpoint's directory, or a directory with a file that names the latest one.
    """
    try:
        return _import(url, options)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatUnsupported(
            url=url,
            problem=f"its files are of a known system and not built as that builds them ({error!r}). If "
            "that system can load it, please report what wrote it.",
        ) from error


def is_file(url: str, *, options: Options | None = None) -> bool:
    """Whether the URL names a file; no run is one."""
    store, name = _beside(url, options)
    return name not in ("", ".", "..") and store.exists(name)


def _import(url: str, options: Options | None) -> Imported | None:
    if url.endswith((*_SUFFIXES, _SAFETENSORS)):
        store, name = _beside(url, options)
        if store.exists(name):
            opener = open_hugging_face if name.endswith(_SAFETENSORS) else open_full
            return opener(store, name, options)
    store = open_store(url, options=options)
    for pointer in ("latest", "latest_universal"):
        tag = _tag(store, pointer) if store.exists(pointer) else None
        if tag is not None:
            opener = _opener(store, f"{tag}/")
            if opener is None:
                problem = (
                    f"{pointer} names {tag!r}, where no checkpoint is. Open one of its other directories."
                )
                raise NoCheckpoint(url=url, problem=problem)
            return opener(store, tag, options)
    iteration = directory(store)
    if iteration is not None and (opener := _opener(store, f"{iteration}/")) is not None:
        return opener(store, iteration, options)
    opener = _opener(store, "")
    return opener(store, "", options) if opener else None


def _opener(store: Store, at: str) -> Opener | None:
    """What reads the directory: names that must be there are tried, and only if none is, it is listed."""
    if store.exists(f"{at}zero/optimizer_state.pt"):
        return open_universal
    marks = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    rest = ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    if any(store.exists(at + mark) for mark in (*marks, *rest)):
        return open_deepspeed
    if store.exists(at + METADATA):
        return open_megatron if is_megatron(store, at) else open_dcp
    return open_hugging_face if is_hugging_face(store, at.rstrip("/")) else None


def _beside(url: str, options: Options | None) -> tuple[Store, str]:
    """The store that a file would be in, and its name there."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return open_store(parent or ("/" if url.startswith("/") else "."), options=options), name


def _tag(store: Store, pointer: str) -> str:
    data = store.read(pointer)
    tag = data.decode(errors="replace").strip()
    if len(data) > 4096 or not _TAG.fullmatch(tag) or tag in (".", ".."):
        raise ChecksumMismatch(
            url=f"{store.url}/{pointer}",
            problem="it names no directory beside it. Open the directory itself.",
        )
    return tag
