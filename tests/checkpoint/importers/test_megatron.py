"""Megatron-core's `torch_dist`, as its public description has it, is indexed in place to the bit.

Not compared with Megatron-core itself, which isn't installed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.translated_view import as_ours
from elastic_train.checkpoint.reader import Checkpoint, open_checkpoint
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from tests.checkpoint.importers.megatron_files import bytes_of, cut, folded, settings, write

pytestmark = pytest.mark.ring1

SHAPES = {
    "embedding.word_embeddings.weight": (16, 8),
    "decoder.layers.self_attention.linear_proj.weight": (4, 8, 8),
    "decoder.layers.input_layernorm.weight": (4, 8),
    "decoder.final_layernorm.weight": (8,),
}
PARTS = {
    "embedding.word_embeddings.weight": (2, 1),
    "decoder.layers.self_attention.linear_proj.weight": (4, 1, 2),
    "decoder.layers.input_layernorm.weight": (4, 1),
    "decoder.final_layernorm.weight": (1,),
}
"""Two stages of two layers, tensor parallelism of two."""
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
Values = dict[str, torch.Tensor]


def values() -> Values:
    torch.manual_seed(0)
    return {f"{state}.{key}": torch.randn(shape) for key, shape in SHAPES.items() for state in STATES}


def model(tensors: Values) -> dict[str, Any]:
    """The weights in bfloat16, and what ranks hold beside them."""
    state: dict[str, Any] = {key: cut(tensors[f"fp32_param.{key}"].bfloat16(), PARTS[key]) for key in SHAPES}
    for layer in range(4):
        state[f"decoder.layers.self_attention._extra_state/shard_{layer}_4"] = bytes_of(None)
    state["rng_state/shard_0.0_2.1"] = bytes_of([{"random_rng_state": (3, (1, 2), None)}])
    return state


def sharded(tensors: Values) -> dict[str, Any]:
    """Optimizer states in the shapes of the model."""
    return {
        f"optimizer.state.{name}": cut(tensor, PARTS[name.partition(".")[2]])
        for name, tensor in tensors.items()
    }


def by_ranges(tensors: Values) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The same in ranges of three data-parallel ranks: folded, but for tensors of one dim."""
    state: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        key = name.partition(".")[2]
        if tensor.ndim == 1:
            state[f"chained_0.optimizer.state.{name}"] = cut(tensor, (2,))
        else:
            state[f"chained_0.optimizer.state.{name}"] = folded(tensor, PARTS[key], 3)
            shapes[f"chained_0.optimizer.state.{name}"] = tuple(tensor.shape)
    return state, shapes


def check(checkpoint: Checkpoint, tensors: Values) -> None:
    for name, tensor in tensors.items():
        state, _, key = name.partition(".")
        found = checkpoint.read(key, "param" if state == "fp32_param" else state)
        assert found.tobytes() == tensor.numpy().tobytes(), name
    assert len(checkpoint.tensors) == len(tensors)
    assert checkpoint.document["step"] == 80
    assert checkpoint.document["optimizer"]["class"] == "AdamW"
    assert checkpoint.document["trainable"] == sorted(SHAPES)
    assert (
        checkpoint.document["optimizer"]["scalars"]["decoder.final_layernorm.weight"]["step"]["value"] == 80.0
    )


def test_states_in_the_shapes_of_the_model_are_read(tmp_path: Path) -> None:
    tensors = values()
    common = settings(80) | {"optimizer": {"optimizer": {"state": {"common_step": 80}, "param_groups": []}}}
    write(tmp_path, 80, model(tensors) | sharded(tensors), common=common)
    checkpoint = open_checkpoint(str(tmp_path))
    check(checkpoint, tensors)
    assert checkpoint.document["foreign"]["args"]["num_layers"] == 4
    lost = checkpoint.document["foreign"]["not_restored"]
    assert "decoder.layers.self_attention._extra_state: an object of Megatron's ranks" in lost
    check(open_checkpoint(str(tmp_path / "iter_0000080")), tensors)


def test_states_that_ranks_hold_as_ranges_of_blocks_are_read(tmp_path: Path) -> None:
    tensors = values()
    states, shapes = by_ranges(tensors)
    numbers = {"param_groups": [{"lr": 1e-3, "wd_mult": 1.0, "step": 80}], "state": {}}
    objects = {
        "chained_0.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": bytes_of(numbers),
        "common_state/shard_0_1": bytes_of(settings(80)),
    }
    write(tmp_path, 80, model(tensors) | states | objects, shapes=shapes)
    checkpoint = open_checkpoint(str(tmp_path))
    check(checkpoint, tensors)
    assert checkpoint.document["foreign"]["param_groups"][0]["wd_mult"] == 1.0
    assert checkpoint["decoder.layers.self_attention.linear_proj.weight"]["exp_avg"][3, 2:5, 7].tolist() == (
        tensors["exp_avg.decoder.layers.self_attention.linear_proj.weight"][3, 2:5, 7].tolist()
    )


def test_layers_get_names_of_their_own_through_a_specification(tmp_path: Path) -> None:
    tensors = values()
    write(tmp_path, 80, model(tensors) | sharded(tensors), common=settings(80))
    spec = """
rest = "keep"
[[rule]]
select = "decoder.layers.self_attention.linear_proj.weight"
to = "layers.{l}.wo.weight"
operations = [{ op = "unstack" }]
"""
    ours = as_ours(open_checkpoint(str(tmp_path)), parse(spec))
    wanted = tensors["exp_avg_sq.decoder.layers.self_attention.linear_proj.weight"][2]
    assert ours.read("layers.2.wo.weight", "exp_avg_sq").tobytes() == wanted.numpy().tobytes()


def test_weights_alone_are_read(tmp_path: Path) -> None:
    tensors = values()
    write(tmp_path, 0, model(tensors), common=settings(0))
    checkpoint = open_checkpoint(str(tmp_path))
    assert {info.dtype for info in checkpoint.tensors.values()} == {"bfloat16"}
    assert any("optimizer" in lost for lost in checkpoint.document["foreign"]["not_restored"])


def buckets(tensors: Values, root: Path) -> None:
    group = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0"
    key = f"{group}.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    write(root, 80, model(tensors) | {key: cut(torch.zeros(64), (2,))}, common=settings(80))


def another_form(tensors: Values, root: Path) -> None:
    directory = write(root, 80, model(tensors), common=settings(80))
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def wrong_shape(tensors: Values, root: Path) -> None:
    states, shapes = by_ranges(tensors)
    key = "chained_0.optimizer.state.exp_avg.embedding.word_embeddings.weight"
    write(root, 80, model(tensors) | states, shapes=shapes | {key: (16, 7)}, common=settings(80))


def no_parameter(tensors: Values, root: Path) -> None:
    state = model(tensors) | sharded(tensors)
    del state["decoder.final_layernorm.weight"]
    write(root, 80, state, common=settings(80))


def unsaid(tensors: Values, root: Path) -> None:
    states, shapes = by_ranges(tensors)
    (write(root, 80, model(tensors) | states, shapes=shapes) / "metadata.json").unlink()


def pointer(tensors: Values, root: Path) -> None:
    write(root, 80, model(tensors), common=settings(80))
    (root / "latest_checkpointed_iteration.txt").write_text("../../etc")


@pytest.mark.parametrize(
    ("make", "error", "problem"),
    [
        (buckets, FormatUnsupported, "--dist-ckpt-optim-fully-reshardable"),
        (another_form, FormatUnsupported, "form 'zarr'"),
        (wrong_shape, ChecksumMismatch, "folded"),
        (no_parameter, ChecksumMismatch, "without decoder.final_layernorm.weight"),
        (unsaid, FormatUnsupported, "metadata.json"),
        (pointer, ChecksumMismatch, "no iteration"),
    ],
)
def test_what_cannot_be_read_rightly_is_refused(
    tmp_path: Path, make: Callable[[Values, Path], None], error: type[Exception], problem: str
) -> None:
    make(values(), tmp_path)
    with pytest.raises(error, match=problem):
        open_checkpoint(str(tmp_path))
