"""DeepSpeed files of tensor- and pipeline-parallel ranks join up to the tensors that were cut."""

from __future__ import annotations

import io
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import CheckpointError, ChecksumMismatch, FormatUnsupported, TensorMismatch

pytestmark = pytest.mark.ring1

STATES = ("param", "exp_avg", "exp_avg_sq")
Group = Mapping[str, torch.Tensor]
Write = Callable[..., Path]

INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm.*"],
    "parameter_with_row_parallelism_patterns": [r".*\.down\.weight"],
    "vocabulary_parameter_patterns": [r"0\.emb\.weight"],
    "original_vocab_size": 7,
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate_up\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r".*\.qkv\.weight"], "shape": ((4, 2, 2), 3), "partition_dim": 0}
    ],
    "pipeline_replicated_parameter_patterns": [r".*tied.*"],
}


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """A writer of ZeRO-1 files. `ranks[mp]` are the parameters that a model-parallel rank holds, by group."""
    module = types.ModuleType("deepspeed.utils.tensor_fragment")
    fragment = type("fragment_address", (), {"__module__": module.__name__})
    module.fragment_address = fragment  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def address(start: int, numel: int) -> Any:
        found = fragment()
        found.start, found.numel = start, numel
        return found

    def save(
        ranks: Sequence[Sequence[Group]],
        *,
        dp: int,
        tp: int = 1,
        info: Any = None,
        steps: Mapping[int, float] | None = None,
        module: Mapping[str, torch.Tensor] | None = None,
    ) -> Path:
        root = tmp_path / "tag"
        root.mkdir(exist_ok=True)
        for mp, groups in enumerate(ranks):
            model = {
                "module": module or {}, "buffer_names": [], "dp_world_size": dp, "global_steps": 5,
                "param_shapes": [OrderedDict((k, v.shape) for k, v in g.items()) for g in groups],
                "checkpoint_parallel_dimensions": {"pp_degree": len(ranks) // tp, "tp_degree": tp},
            }  # fmt: skip
            put(
                root / f"mp_rank_{mp:02d}_model_states.pt",
                model | ({"universal_checkpoint_info": info} if info else {}),
            )
            for rank in range(dp):
                zero = shard(groups, rank, dp, (steps or {}).get(rank, 5.0))
                put(
                    root / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt",
                    {"optimizer_state_dict": zero},
                )
        return root

    def shard(groups: Sequence[Group], rank: int, dp: int, step: float) -> dict[str, Any]:
        masters, states, mappings = [], {}, []
        for number, group in enumerate(groups):
            flat = torch.cat([v.flatten() for v in group.values()])
            share = -(-len(flat) // (2 * dp)) * 2
            low, high = rank * share, (rank + 1) * share
            masters.append(flat[low:high].clone())
            padded = torch.nn.functional.pad(flat, (0, share * dp - len(flat)), value=99.0)[low:high]
            states[number] = {
                "step": torch.tensor(step),
                "exp_avg": padded + 1000,
                "exp_avg_sq": padded + 2000,
            }
            places, at = OrderedDict(), 0
            for fqn, value in group.items():
                first, last = max(at, low), min(at + value.numel(), high)
                if first < last:
                    places[fqn] = address(first - low, last - first)
                at += value.numel()
            mappings.append(places)
        settings = [{"lr": 0.1 * (g + 1)} for g in range(len(groups))]
        return {
            "base_optimizer_state": {"state": states, "param_groups": settings},
            "single_partition_of_fp32_groups": masters, "param_slice_mappings": mappings,
            "partition_count": [dp] * len(groups),
        }  # fmt: skip

    return save


def put(path: Path, value: Any) -> None:
    """Written through memory, so that the file doesn't keep its name."""
    sink = io.BytesIO()
    torch.save(value, sink)
    path.write_bytes(sink.getvalue())


def numbers(*shape: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


WHOLE = {
    "0.emb.weight": numbers(7, 3, start=0),
    "0.norm.weight": numbers(5, start=100),
    "0.qkv.weight": numbers(8, 3, start=200),
    "0.up.weight": numbers(6, 4, start=300),
    "1.gate_up.weight": numbers(8, 3, start=400),
    "1.down.weight": numbers(3, 6, start=500),
    "1.bias": numbers(4, start=600),
}


def cut(fqn: str, value: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's slice, cut as Megatron cuts it."""
    if "norm" in fqn:
        return value
    if "qkv" in fqn:
        return torch.cat([part.chunk(tp)[rank] for part in value.split((4, 2, 2))])
    if "gate_up" in fqn:
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
    if "emb" in fqn:
        value = torch.nn.functional.pad(value, (0, 0, 0, 1), value=-1.0)
    return value.chunk(tp, dim=1 if "down" in fqn else 0)[rank].contiguous()


def stages(tp: int) -> list[list[Group]]:
    """Two pipeline stages of `tp` ranks; matrices in one group, vectors in the other, one of them tied."""
    ranks: list[list[Group]] = []
    for stage in ("0.", "1."):
        for rank in range(tp):
            own = {k: cut(k, v, tp, rank) for k, v in WHOLE.items() if k.startswith(stage)}
            groups = [{k: v for k, v in own.items() if v.ndim == d} for d in (2, 1)]
            groups[1]["tied_modules.scale.weight"] = numbers(2, start=700 if stage == "0." else 800)
            ranks.append(groups)
    return ranks


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_slices_of_tensor_and_pipeline_parallel_ranks_join_up(write: Write, dp: int) -> None:
    info = {**INFO, "tp_replicated_parameter_patterns": [r".*norm.*", r"tied.*"]}
    checkpoint = open_checkpoint(str(write(stages(2), dp=dp, tp=2, info=info)))
    expected = WHOLE | {"tied_modules.scale.weight": numbers(2, start=700)}
    assert {t for t, _ in checkpoint.tensors} == set(expected)
    for fqn, value in expected.items():
        for number, state in enumerate(STATES):
            assert np.array_equal(checkpoint.read(fqn, state), value.numpy() + 1000 * number), (fqn, state)
    lr = {
        p: g["hyperparameters"]["lr"] for g in checkpoint.document["optimizer"]["groups"] for p in g["params"]
    }
    assert lr == {k: 0.1 if v.ndim == 2 else 0.2 for k, v in expected.items()}


def test_pipeline_stages_alone_need_no_patterns(write: Write) -> None:
    checkpoint = open_checkpoint(str(write(stages(1)[:1] + stages(1)[1:], dp=2, tp=1)))
    assert np.array_equal(checkpoint.read("1.down.weight", "param"), WHOLE["1.down.weight"].numpy())


def test_fused_parts_of_unequal_width_are_placed_as_recorded(write: Write) -> None:
    q, kv = numbers(6, 2, start=0), numbers(2, 2, start=50)
    ranks = [[{"qkv": torch.cat([q[:2], kv])}], [{"qkv": q[2:].clone()}]]
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": ((6, 2), 2), "partition_dim": 0}],
        "sub_param_shard_widths": {"qkv": [[2, 4], [2, 0]]},
    }
    checkpoint = open_checkpoint(str(write(ranks, dp=2, tp=2, info=info)))
    assert np.array_equal(checkpoint.read("qkv", "param"), torch.cat([q, kv]).numpy())


@pytest.mark.parametrize(
    ("info", "error", "words"),
    [
        (None, FormatUnsupported, "universal_checkpoint_info"),
        ({**INFO, "universal_checkpoint_version": 0.5}, FormatUnsupported, "Upgrade"),
        ({**INFO, "parameter_to_average_patterns": [r".*norm.*"]}, FormatUnsupported, "averages"),
        ({**INFO, "affine_map": {"version": 1, "params": {r"0\.up.*": {}}}}, FormatUnsupported, "affine"),
        ({**INFO, "tp_replicated_parameter_patterns": ["("]}, ChecksumMismatch, "pattern"),
        (
            {**INFO, "parameter_with_2_sub_params_cat_dim_0": [], "original_vocab_size": 99},
            TensorMismatch, "vocab",
        ),
    ],
)  # fmt: skip
def test_what_the_patterns_cannot_say_is_refused(
    write: Write, info: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_checkpoint(str(write(stages(2), dp=1, tp=2, info=info)))


def test_shards_that_changed_places_are_found_without_their_names(write: Write) -> None:
    root = write([[{"a": numbers(5, 5, start=0), "b": numbers(7, start=30)}]], dp=2)
    one, other = (root / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(ChecksumMismatch, match="changed places"):
        open_checkpoint(str(root))


def test_shards_of_two_steps_are_found(write: Write) -> None:
    root = write([[{"a": numbers(5, 5, start=0)}]], dp=3, steps={2: 6.0})
    with pytest.raises(ChecksumMismatch, match="number of steps"):
        open_checkpoint(str(root))


def test_a_parameter_with_too_few_or_too_many_elements_is_refused(write: Write) -> None:
    write([[{"a": numbers(4, 4, start=0)}]], dp=2)
    root = write([[{"a": numbers(4, 4, start=0)}]], dp=2)
    model = torch.load(root / "mp_rank_00_model_states.pt", weights_only=False)
    for shape in ((4, 5), (4, 3)):
        model["param_shapes"] = [OrderedDict(a=torch.Size(shape))]
        put(root / "mp_rank_00_model_states.pt", model)
        with pytest.raises(CheckpointError, match="a has"):
            open_checkpoint(str(root))


def test_frozen_parameters_and_views_of_one_buffer(write: Write) -> None:
    flat = numbers(20, start=0)
    module = {"a": flat[:4], "tied": flat[:4], "near": flat[2:6], "frozen": flat[8:12].view(2, 2)}
    checkpoint = open_checkpoint(str(write([[{"a": numbers(4, start=40)}]], dp=1, module=module)))
    assert checkpoint.aliases == {"tied": "a"}
    assert np.array_equal(checkpoint.read("tied", "param"), np.arange(40.0, 44.0, dtype=np.float32))
    assert np.array_equal(checkpoint.read("near", "param"), np.arange(2.0, 6.0, dtype=np.float32))
    frozen = np.arange(8.0, 12.0, dtype=np.float32).reshape(2, 2)
    assert np.array_equal(checkpoint.read("frozen", "param"), frozen)
    assert checkpoint.document["trainable"] == ["a"]
