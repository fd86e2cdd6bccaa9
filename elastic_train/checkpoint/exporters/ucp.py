"""Universal directories of DeepSpeed, as its converter writes them, for ZeRO-1, -2 and -3 at once.

Each parameter has a directory with `fp32.pt`, one file per optimizer state, and `step.pt`. Buffers, frozen
parameters, ties and the groups' parameters are in the model file, as DeepSpeed's own checkpoints have them.
ZeRO-3 looks for counters and for a model file elsewhere, and takes each parameter in its shape too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import encode
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.exporters.blocks import BLOCK, blocks, written_dtype
from elastic_train.checkpoint.exporters.pickled import Ordered, Tensor, size
from elastic_train.checkpoint.exporters.target import Exported, check_empty
from elastic_train.checkpoint.exporters.torch_state import (
    DOCUMENT,
    groups,
    named,
    scalar_bytes,
    scalars,
    tensor_bytes,
)
from elastic_train.checkpoint.exporters.torch_zip import write_torch
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.errors import TensorMismatch
from elastic_train.storage.store import Store

MASTER = "float32"
VERSION = "0.19.8"
"""The release of DeepSpeed whose form this is."""
WRITERS = 4


def export_ucp(source: Readable, store: Store, *, limit: int = BLOCK) -> Exported:
    """Write `source` under the root of `store` as `global_step<n>_universal`, with `latest_universal`."""
    check_empty(store)
    step = source.document.get("step") or 0
    tag = f"global_step{step}_universal"
    owned = _owned(source)
    jobs: dict[str, Callable[[str], int]] = {}
    for tensor, state in source.tensors:
        if tensor in owned and state != "buffer":
            name = "fp32" if state == "param" else state
            jobs[f"{tag}/zero/{tensor}/{name}.pt"] = _atom(source, store, (tensor, state), limit)
    for tensor, state, value, dtype in scalars(source.document):
        if tensor in owned:
            jobs[f"{tag}/zero/{tensor}/{state}.pt"] = _small(store, *_scalar(value, dtype))
    jobs[f"{tag}/zero/optimizer_state.pt"] = _settings(source, store)
    jobs[f"{tag}/mp_rank_00_model_states.pt"] = _model(source, store, owned, limit)
    jobs[f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt"] = _small(store, _facts(source))
    with ThreadPoolExecutor(WRITERS) as pool:
        total = sum(pool.map(lambda job: job[1](job[0]), jobs.items()))
    store.write("latest_universal", tag.encode())
    return Exported(files=(*jobs, "latest_universal"), bytes=total + len(tag))


def _owned(source: Readable) -> dict[str, int]:
    """The optimizer's parameters and their groups; without an optimizer all parameters, in one."""
    made = groups(source.document)
    found = {fqn: number for number, group in enumerate(made) for fqn in group["params"]}
    if not found:
        found = dict.fromkeys(named(source).params, 0)
    gone = [fqn for fqn in found if (fqn, "param") not in source.tensors]
    if gone:
        raise TensorMismatch(url=source.url, problem=f"the optimizer holds {gone[0]}, which isn't stored.")
    strange = [t for t, _ in named(source).states if t not in found]
    if strange:
        raise TensorMismatch(url=source.url, problem=f"{strange[0]} has optimizer states and is in no group.")
    return found


def _atom(source: Readable, store: Store, name: Name, limit: int) -> Callable[[str], int]:
    info = source.tensors[name]
    dtype = written_dtype(info.dtype, MASTER) if name[1] == "param" else info.dtype
    length = tensor_bytes(source, name) // ELEMENTS[info.dtype].bytes * ELEMENTS[dtype].bytes
    tree = {"param": Tensor("0", dtype, info.shape), "cat_dim": 0}

    def write(path: str) -> int:
        parts = (
            b.bytes for b in blocks(source, [name], dtype=dtype if dtype != info.dtype else None, limit=limit)
        )
        with store.stream(path) as sink:
            return write_torch(sink.write, tree, {"0": (length, parts)}, root=_root(path))

    return write


def _scalar(value: Any, dtype: str | None) -> tuple[Any, bytes]:
    """A number as torch has it, and the bytes of its storage."""
    return (value, b"") if dtype is None else (Tensor("0", dtype, ()), scalar_bytes(value, dtype))


def _small(store: Store, tree: Any, data: bytes = b"") -> Callable[[str], int]:
    """Writes a file with at most one storage, which is at hand."""
    storages = {"0": (len(data), [data])} if data else {}

    def write(path: str) -> int:
        with store.stream(path) as sink:
            return write_torch(sink.write, tree, storages, root=_root(path))

    return write


def _settings(source: Readable, store: Store) -> Callable[[str], int]:
    made = [{**g, "params": [i]} for i, g in enumerate(groups(source.document))] or [{"params": [0]}]
    steps = [(value, dtype) for _, state, value, dtype in scalars(source.document) if state == "step"]
    step, data = _scalar(*steps[0]) if steps else (source.document.get("step") or 0, b"")
    whole = {"state": {0: {"step": step}}, "param_groups": made}
    tree = {"overflow": False, "ds_version": VERSION, "param_groups": made, "optimizer_state_dict": whole}
    return _small(store, tree, data)


def _model(source: Readable, store: Store, owned: Mapping[str, int], limit: int) -> Callable[[str], int]:
    """The model file holds what the optimizer doesn't: its parameters' bytes are in their own files."""
    kinds = named(source)
    frozen = [t for t in kinds.params if t not in owned]
    held: list[Name] = [*((t, "buffer") for t in kinds.buffers), *((t, "param") for t in frozen)]
    count = 1 + max(owned.values(), default=0)
    tree = _facts(source) | {
        "module": Ordered({n[0]: _tensor(source, n, str(i)) for i, n in enumerate(held)}),
        "buffer_names": list(kinds.buffers),
        "param_shapes": [_shapes(source, [t for t in owned if owned[t] == g]) for g in range(count)],
        "frozen_param_shapes": _shapes(source, frozen) if frozen else None,
        "frozen_param_fragments": None,
        "shared_params": dict(source.aliases),
        DOCUMENT: encode(source.document).decode(),
    }

    def write(path: str) -> int:
        storages = {
            str(i): (
                tensor_bytes(source, n),
                (b.bytes for b in blocks(source, [n], limit=limit)),
            )
            for i, n in enumerate(held)
        }
        with store.stream(path) as sink:
            return write_torch(sink.write, tree, storages, root=_root(path))

    return write


def _facts(source: Readable) -> dict[str, Any]:
    """What each model file says; ZeRO-3 takes nothing else from it."""
    return {
        "module": Ordered({}),
        "buffer_names": [],
        "param_shapes": [],
        "optimizer": None,
        "lr_scheduler": (source.document.get("foreign") or {}).get("lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": source.document.get("step") or 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": VERSION,
    }


def _tensor(source: Readable, name: Name, key: str) -> Tensor:
    info = source.tensors[name]
    return Tensor(key, info.dtype, info.shape)


def _shapes(source: Readable, names: Sequence[str]) -> Ordered:
    return Ordered({t: size(source.tensors[t, "param"].shape) for t in names})


def _root(path: str) -> str:
    """torch names the directory inside the file after the file."""
    return path.rpartition("/")[2].removesuffix(".pt")
