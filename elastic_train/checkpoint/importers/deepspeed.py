"""DeepSpeed's own checkpoints, ZeRO stages 1 to 3: which stage it is, and the parts joined."""

from __future__ import annotations

from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.deepspeed_experts import expert_rows, experts_of
from elastic_train.checkpoint.importers.deepspeed_files import Tag, open_tag
from elastic_train.checkpoint.importers.deepspeed_model import (
    aliases_of,
    facts_of,
    other_rows,
    shapes_by_group,
)
from elastic_train.checkpoint.importers.foreign_document import document
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import Opaque
from elastic_train.checkpoint.importers.tp_patterns import TensorParallel
from elastic_train.checkpoint.importers.zero3 import read_zero3
from elastic_train.checkpoint.importers.zero12 import read_zero12
from elastic_train.checkpoint.importers.zero_state import optimizer_of
from elastic_train.errors import FormatUnsupported, FragmentMissing
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store


def open_deepspeed(store: Store, directory: str, options: Options | None = None) -> Imported:
    """Index one tag's directory; parameters are the optimizer's master weights where there are such."""
    tag = open_tag(store, directory)
    if not tag.optimizers:
        shapes_by_group(tag.model())  # says so where it was saved without ZeRO
        raise FragmentMissing(
            url=tag.url, problem="its *_optim_states.pt are gone. Copy them from where it was."
        )
    kinds = {_kind(tag, rank) for rank in tag.optimizers}
    if len(kinds) != 1:
        raise FormatUnsupported(url=tag.url, problem="its optimizer files are of different ZeRO stages.")
    parallel, experts = parallel_of(tag), experts_of(tag)
    if kinds == {"partitioned"}:
        system = "DeepSpeed ZeRO-3"
        rows, optimizer = read_zero3(tag, experts)
    else:
        system = f"DeepSpeed ZeRO-{_stage(tag)}"
        rows, optimizer = read_zero12(tag, parallel, experts)
    owned = sorted({row.tensor for row in rows})
    aliases = aliases_of(tag, owned)
    rows += other_rows(tag, owned, aliases, parallel)
    rows += expert_rows(experts, {*owned})
    facts, lost = facts_of(tag)
    said = document(
        step=tag.model().tree.get("global_steps"),
        aliases=aliases,
        optimizer=optimizer,
        system=system,
        facts={**facts, **zero_facts(optimizer_of(tag.optimizers[0, 0]))},
        not_restored=lost,
    )
    return imported(store, directory, rows, said, aliases=aliases, options=options)


def parallel_of(tag: Tag) -> TensorParallel:
    """How model-parallel ranks divide among stages and tensor parallelism: mp = stage * degree + rank."""
    tree = tag.model().tree
    _, mp = tag.ranks
    dims = tree.get("checkpoint_parallel_dimensions") or {}
    degree = dims.get("tp_degree", tree.get("mp_world_size", mp)) if mp > 1 else 1
    if not isinstance(degree, int) or degree < 1 or mp % degree:
        raise FormatUnsupported(
            url=tag.url, problem=f"{mp} model-parallel ranks aren't whole stages of {degree}."
        )
    return TensorParallel(url=tag.url, degree=degree, info=tree.get("universal_checkpoint_info"))


def zero_facts(zero: Any) -> dict[str, Json]:
    """Settings of the ZeRO optimizer, beside its state."""
    scaler = zero.get("loss_scaler")
    return {
        "loss_scale": scaler.get("cur_scale") if isinstance(scaler, Opaque) else None,
        "dynamic_loss_scale": bool(zero.get("dynamic_loss_scale")),
        "clip_grad": zero.get("clip_grad") if isinstance(zero.get("clip_grad"), int | float) else None,
    }


def _kind(tag: Tag, rank: tuple[int, int]) -> str:
    file = tag.optimizers[rank]
    zero = optimizer_of(file)
    if "param_slice_mappings" in zero and "single_partition_of_fp32_groups" in zero:
        return "sharded"
    if "fp32_flat_groups" in zero and "optimizer_state_dict" in zero:
        return "partitioned"
    raise FormatUnsupported(
        url=file.url,
        problem="it doesn't record where each parameter is (param_slice_mappings), as DeepSpeed before 0.7 "
        "didn't. Load "
        "it with DeepSpeed and save it again.",
    )


def _stage(tag: Tag) -> int:
    stage = optimizer_of(tag.optimizers[0, 0]).get("zero_stage")
    value = stage.args[0] if isinstance(stage, Opaque) and stage.args else stage
    return value if isinstance(value, int) else 1
