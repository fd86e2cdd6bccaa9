"""Bytes per worker, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.planner.memory_model import WorkerMemory, memory_per_worker
from elastic_train.planner.model_shape import ModelShape, TensorShape
from elastic_train.planner.plan import Mesh

pytestmark = pytest.mark.ring0

LAYERS = tuple(
    TensorShape(fqn=f"layers.{i}.w", shape=(12, 10), item_bytes=4, unit=f"layers.{i}") for i in range(3)
)
EMBEDDING = TensorShape(fqn="embed", shape=(30, 10), item_bytes=4)
MODEL = ModelShape(tensors=(*LAYERS, EMBEDDING))


def test_adam_in_full_precision_takes_sixteen_bytes_an_element():
    memory = memory_per_worker(MODEL, Mesh(dp_replicate=4))
    assert memory == WorkerMemory(
        weights=660 * 4, optimizer=660 * 8, master=0, gradients=660 * 4, gathered=0, activations=0
    )
    assert memory.training == 16 * MODEL.parameters


def test_adam_in_mixed_precision_takes_sixteen_bytes_an_element_too():
    half = tuple(replace(t, item_bytes=2) for t in MODEL.tensors)
    memory = memory_per_worker(ModelShape(tensors=half, master_bytes=4), Mesh())
    assert (memory.weights, memory.gradients, memory.master + memory.optimizer) == (1320, 1320, 660 * 12)


def test_shards_divide_the_state_and_units_are_gathered_whole():
    memory = memory_per_worker(MODEL, Mesh(dp_replicate=2, dp_shard=3))
    assert memory.state == 220 * 12
    assert memory.gradients == 220 * 4
    # The root for the whole step, two layers of 120 elements, and the root's own whole gradient.
    assert memory.gathered == (300 + 2 * 120 + 300) * 4


def test_an_uneven_dim_costs_what_its_largest_shard_costs():
    tensor = TensorShape(fqn="w", shape=(7, 2), item_bytes=4)
    assert [tensor.shard_numel(ranks) for ranks in (1, 2, 3, 4, 7, 9)] == [14, 8, 6, 4, 2, 2]
    memory = memory_per_worker(ModelShape(tensors=(tensor,)), Mesh(dp_shard=4))
    assert memory.weights == 4 * 4
    assert memory.gathered == 2 * (4 * 4 * 4), "gathered tensors are padded to equal chunks"


def test_frozen_tensors_have_weights_only_and_buffers_are_never_cut():
    frozen = replace(LAYERS[0], trainable=False)
    buffer = TensorShape(fqn="freqs", shape=(8,), item_bytes=4, trainable=False, sharded=False)
    scalar = TensorShape(fqn="scale", shape=(), item_bytes=4)
    memory = memory_per_worker(ModelShape(tensors=(frozen, buffer, scalar)), Mesh(dp_shard=2))
    assert (memory.weights, memory.optimizer, memory.gradients) == (240 + 32 + 4, 8, 4)
    assert memory.gathered == 120 * 4 + 2 * 4 + 2 * 4
    assert ModelShape(tensors=(frozen, buffer, scalar)).parameters == 121


def test_a_unit_that_computes_in_another_precision_is_a_copy_even_without_shards():
    assert memory_per_worker(replace(MODEL, compute_bytes=2), Mesh()).gathered == (300 + 240 + 300) * 2


def test_activations_grow_with_the_micro_batch():
    model = replace(MODEL, activation_bytes_per_sample=1000, micro_size=3)
    assert memory_per_worker(model, Mesh()).activations == 3000


def test_old_shards_are_held_while_the_cut_changes_and_only_then():
    before = Mesh(dp_replicate=2, dp_shard=2)
    changed = memory_per_worker(MODEL, Mesh(dp_shard=3), previous=before)
    assert changed.held == 330 * 12
    assert changed.resharding == (220 + 330) * 12
    assert memory_per_worker(MODEL, Mesh(dp_replicate=1, dp_shard=2), previous=before).held == 0


def test_a_breakdown_names_what_is_not_zero():
    assert str(memory_per_worker(MODEL, Mesh())) == "weights 2.6 KiB, optimizer 5.2 KiB, gradients 2.6 KiB"
