"""Read DeepSpeed's model files: buffers, frozen parameters, ties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.deepspeed_files import Tag
from elastic_train.checkpoint.importers.foreign_document import plain
from elastic_train.checkpoint.importers.foreign_rows import FileSlice, flat_parts, flat_rows, whole_row
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import TorchFile, check_readable, is_contiguous
from elastic_train.checkpoint.importers.tp_patterns import Shape, TensorParallel
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, TensorMismatch

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_ENGINE = frozenset(
    (
        *_COUNTERS, "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "num_experts", "frozen_param_fragments", "shared_params", "lr_scheduler", "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
        "ds_config", "ds_version", "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers",
    )
)  # fmt: skip
"""What the engine writes; every other entry is the client's own state."""


def shapes_by_group(file: TorchFile) -> list[dict[str, Shape]]:
    """fqn -> shape of the optimizer's parameters by group (ZeRO-3: sub-group), in the buffers' order."""
    groups = file.tree.get("param_shapes")
    if not isinstance(groups, list):
        raise FormatUnsupported(
            url=file.url,
            problem="it was saved without ZeRO, and then its optimizer state has no names. Save it under "
            "ZeRO stage 1.",
        )
    return [{str(fqn): tuple(shape) for fqn, shape in group.items()} for group in groups]


def tensors(file: TorchFile) -> dict[str, TensorRef]:
    """The module's state dict, as far as it is tensors."""
    module = file.tree.get("module")
    module = module if isinstance(module, dict) else {}
    for name, value in module.items():
        check_readable(value, str(name), url=file.url)
    return {k: v for k, v in module.items() if isinstance(v, TensorRef)}


def aliases_of(tag: Tag, owned: Sequence[str]) -> dict[str, str]:
    """Tied names -> the names that hold the fragments: as recorded, and where all bytes are shared.

    Two tensors are one only if storage, offset, shape and strides agree; views of one buffer are not tied.
    """
    found: dict[str, str] = {}
    for file in tag.models.values():
        found |= {str(alias): str(owner) for alias, owner in (file.tree.get("shared_params") or {}).items()}
    first = tag.model()
    module = tensors(first)
    owners: dict[TensorRef, list[str]] = {}
    for name in owned:
        if name in module:
            owners.setdefault(module[name], []).append(name)
    others = {*module} - {
        *owned,
        *(first.tree.get("buffer_names") or ()),
        *(first.tree.get("frozen_param_shapes") or ()),
    }
    routers = _routers(first, others)
    for name in sorted(others - found.keys()):
        if name in routers:
            found[name] = routers[name]
            continue
        same = owners.get(module[name], [])
        if len(same) == 1 and (tag.partitioned or math.prod(module[name].shape)):
            found[name] = same[0]
    return {alias: owner for alias, owner in found.items() if alias != owner}


def _routers(file: TorchFile, others: Iterable[str]) -> dict[str, str]:
    """Names under which AutoEP's routers are a second time, as the layers they replace called them: the saved
    tensors no longer share their bytes, and nothing else of a layer has a router's names.
    """
    module = tensors(file)
    found: dict[str, str] = {}
    for layer in file.tree.get("ds_autoep_layers") or ():
        path = f"{layer['module_path']}."
        for name in others:
            _, _, rest = name.removeprefix(path).partition(".")
            router = f"{path}router.{rest}"
            if name.startswith(path) and router in module and module[router].shape == module[name].shape:
                found[name] = router
    return found


def other_rows(
    tag: Tag, owned: Sequence[str], aliases: Mapping[str, str], parallel: TensorParallel
) -> Iterator[Row]:
    """Rows of buffers and of parameters that no optimizer holds, which is everything else in the module."""
    known = {*owned, *aliases}
    if tag.layers:
        _check_layers(tag, known)
    first = tag.model()
    buffers = set(first.tree.get("buffer_names") or ())
    frozen = {str(k): tuple(v) for k, v in (first.tree.get("frozen_param_shapes") or {}).items()}
    for name, ref in tensors(first).items():
        if name in known:
            continue
        if name in buffers:
            yield whole_row(first, tag.name(first), name, "buffer", ref)
        elif tag.partitioned:
            if name not in frozen:
                raise TensorMismatch(
                    url=first.url,
                    problem=f"{name} is neither the optimizer's, nor frozen, nor a buffer, nor tied.",
                )
            yield from _partitioned(tag, name, frozen[name])
        else:
            yield from _whole(tag, name, parallel)


def _whole(tag: Tag, name: str, parallel: TensorParallel) -> Iterator[Row]:
    """A parameter that each tensor-parallel rank's module holds its slice of."""
    files = [tag.model(mp) for mp in range(parallel.degree)]
    if any(name not in tensors(file) for file in files):
        raise TensorMismatch(
            url=tag.url, problem=f"{name} isn't in the module of every tensor-parallel rank."
        )
    refs = [tensors(file)[name] for file in files]
    if parallel.degree == 1:
        yield whole_row(files[0], tag.name(files[0]), name, "param", refs[0])
        return
    for file, ref, part in zip(files, refs, parallel.slices(name, [r.shape for r in refs]), strict=True):
        if part is not None:
            if not is_contiguous(ref):
                raise FormatUnsupported(url=file.url, problem=f"{name} is a slice that isn't contiguous.")
            count = math.prod(ref.shape)
            flat = TensorRef(ref.storage, ref.dtype, ref.offset, (count,), (1,))
            parts = flat_parts(file, {"param": flat})
            yield from flat_rows(file, tag.name(file), name, parts, at=0, first=0, count=count, of=part)


def _partitioned(tag: Tag, name: str, shape: Shape) -> Iterator[Row]:
    """A frozen parameter under ZeRO-3: each rank has ceil(numel / ranks) elements, the last ones padding."""
    dp, _ = tag.ranks
    numel = math.prod(shape)
    share = -(-numel // dp)
    for rank in range(dp):
        file = tag.models[rank, 0]
        part = (file.tree.get("frozen_param_fragments") or {}).get(name)
        count = max(0, min(share, numel - rank * share))
        if not isinstance(part, TensorRef) or math.prod(part.shape) < count:
            raise ChecksumMismatch(
                url=file.url, problem=f"its part of the frozen parameter {name} is not there."
            )
        if count or (not numel and rank == 0):
            first, of = rank * share, FileSlice.whole(shape)
            parts = flat_parts(file, {"param": part})
            yield from flat_rows(file, tag.name(file), name, parts, at=0, first=first, count=count, of=of)


def _check_layers(tag: Tag, known: set[str]) -> None:
    """Layer files of a pipeline hold copies of the optimizer's parameters; what else they hold is refused."""
    tied = {name.rpartition(".")[2] for name in known if name.startswith("tied_modules.")}
    for file in tag.layers:
        layer = int(tag.name(file).removeprefix("layer_").partition("-")[0])
        strange = [
            n for n in file.tree if f"{layer}.{n}" not in known and str(n).rpartition(".")[2] not in tied
        ]
        if strange:
            raise FormatUnsupported(
                url=file.url,
                problem=f"{strange[0]} is a buffer or a frozen parameter of a pipeline stage, which can't "
                "be read yet.",
            )


def facts_of(tag: Tag) -> tuple[dict[str, Json], list[str]]:
    """Counters, settings and the client's own state as JSON, and what of them can't be restored."""
    tree: Mapping[Any, Any] = tag.model().tree
    lost: list[str] = []

    def kept(name: str, value: Any) -> Json:
        found, missing = plain(value, name)
        lost.extend(missing)
        return found

    module: dict[Any, Any] = tree.get("module") or {}
    lost += [f"module.{k}: no tensor" for k, v in module.items() if not isinstance(v, TensorRef)]
    facts = {
        "version": kept("ds_version", tree.get("ds_version")),
        "counters": {name: kept(name, tree[name]) for name in _COUNTERS if name in tree},
        "config": kept("ds_config", tree.get("ds_config")),
        "lr_scheduler": kept("lr_scheduler", tree.get("lr_scheduler")),
        "client_state": {str(k): kept(str(k), v) for k, v in tree.items() if k not in _ENGINE},
    }
    if len(tag.models) > 1 and tree.get("buffer_names"):
        lost.append("buffers as other ranks than the first have them, which nobody compared")
    if facts["client_state"]:
        lost.append(
            f"{', '.join(facts['client_state'])}: what of them is numbers and text is in foreign.client_state"
        )
    if tree.get("lr_scheduler") is not None:
        lost.append(
            "the learning rate schedule: its state is in foreign.lr_scheduler, and the code's own starts anew"
        )
    return facts, lost


def check_owned(tag: Tag, owned: Sequence[str], named: Iterable[str]) -> None:
    """The optimizer files hold the parameters that the model files name, and no other."""
    strange = sorted(set(owned) ^ set(named))
    if strange:
        where = "optimizer" if strange[0] in set(owned) else "model"
        raise TensorMismatch(
            url=tag.url,
            problem=f"{strange[0]} is only in its {where} files; {len(strange)} names differ. The files are "
            "of two "
            "checkpoints: copy it again.",
        )
