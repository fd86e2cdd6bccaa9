"""Bytes of a stage, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.planner.plan import Mesh
from elastic_train.planner.rows import tensors_of
from elastic_train.planner.stage_memory import StageMemory
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0

SHAPE = transformer()
BLOCK = sum(t.numel for t in SHAPE.tensors if t.layer == 1)
EMBED = 96 * 64


def memory(
    mesh: Mesh, positions: tuple[int, ...], recompute="none", *, accumulates=True, virtual=1, shape=SHAPE
):
    stages = StageMemory(tensors_of(shape), mesh, recompute, accumulates=accumulates, virtual=virtual)
    return stages.of(positions, mesh.pp)


def test_the_first_of_two_stages_holds_two_micro_batches_and_the_last_one():
    kept = SHAPE.layers[1].activation_bytes
    first = memory(Mesh(pp=2), (0, 5, 10))
    assert first.weights == 4 * (EMBED + 4 * BLOCK)
    assert first.activations == 2 * 4 * kept + 2 * SHAPE.boundary_bytes
    assert first.kept == first.gradients == first.weights
    assert memory(Mesh(pp=1), (0, 10)).activations == 8 * kept + SHAPE.layers[-1].activation_bytes


def test_recomputed_blocks_keep_their_input_and_one_is_made_again():
    whole, boundary = SHAPE.layers[1].activation_bytes, SHAPE.boundary_bytes
    full = memory(Mesh(), (0, 10), "full")
    assert full.activations == 8 * boundary + SHAPE.layers[-1].activation_bytes + whole - boundary
    selective = memory(Mesh(), (0, 10), "selective")
    attention = SHAPE.layers[1].dropped_bytes
    assert selective.activations == memory(Mesh(), (0, 10)).activations - 7 * attention


def test_tensor_parallelism_divides_state_and_what_is_inside_of_its_projections():
    one, two = memory(Mesh(), (0, 10)), memory(Mesh(tp=2), (0, 10))
    assert two.state * 2 == one.state
    boundary = SHAPE.boundary_bytes
    whole = 8 * 4 * boundary + boundary  # what norms and projections of a block get, and the head
    working = boundary  # half of what is gathered, and of what is yet to be summed
    assert two.activations == (one.activations - whole) / 2 + whole + working
    spread = replace(SHAPE, positions=32)
    gathered = 8 * 2 * boundary + boundary
    divided = memory(Mesh(tp=2), (0, 10), shape=spread).activations
    assert divided == (one.activations - gathered) / 2 + gathered + working


def test_what_stages_give_each_other_is_whole_on_every_rank_of_tp():
    spread = replace(SHAPE, positions=32)
    inside = [memory(Mesh(tp=2), (0, 5), shape=shape).activations for shape in (SHAPE, spread)]
    as_stages = [memory(Mesh(pp=2, tp=2), (0, 5, 10), shape=shape).activations for shape in (SHAPE, spread)]
    buffers = 2 * SHAPE.boundary_bytes
    handed_on = 2 * SHAPE.boundary_bytes  # of both micro-batches in flight, beside the parts in between
    working = SHAPE.boundary_bytes
    expected = [2 * (kept - working) + working + buffers for kept in inside]
    assert as_stages == [expected[0], expected[1] + handed_on]


def test_accumulated_gradients_are_whole_and_a_single_one_is_divided_at_once():
    mesh = Mesh(dp_shard=4)
    accumulating, once = memory(mesh, (0, 10)), memory(mesh, (0, 10), accumulates=False)
    assert accumulating.gradients == 4 * once.gradients == 4 * SHAPE.parameters
    assert accumulating.kept == once.kept == SHAPE.parameters
    assert once.gathered - accumulating.gathered == 4 * BLOCK
    assert accumulating.gathered == 4 * (2 * EMBED + 2 * BLOCK), "the root and two blocks"


def test_interleaved_stages_hold_more_micro_batches():
    plain = memory(Mesh(pp=2), (0, 5, 10))
    pieces = memory(Mesh(pp=2), (0, 3, 5, 7, 10), virtual=2)
    kept = SHAPE.layers[1].activation_bytes
    assert plain.activations - 2 * SHAPE.boundary_bytes == 2 * 4 * kept
    assert pieces.activations - 2 * SHAPE.boundary_bytes == 4 * kept * (2 + 2 + 1) / 2


def test_a_tied_embedding_is_on_both_ends_of_a_pipeline_and_once_without():
    tied = transformer(tied=True)
    assert memory(Mesh(), (0, 10), shape=tied).weights == 4 * (EMBED + 8 * BLOCK)
    last = memory(Mesh(pp=2), (0, 2, 10), shape=tied)
    assert last.weights == 4 * (EMBED + 7 * BLOCK)
