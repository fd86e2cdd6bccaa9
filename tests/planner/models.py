"""A transformer as the planner sees it, worked out from its widths."""

from __future__ import annotations

from elastic_train.planner.model_shape import Layer, ModelShape, TensorShape, Widths


def transformer(
    *,
    blocks: int = 8,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 96,
    sequence: int = 32,
    micro_size: int = 1,
    block_s: float = 1.0,
    tied: bool = False,
) -> ModelShape:
    """Blocks of four matrices that take `block_s`; a head in proportion to its operations."""
    narrow = hidden * kv_heads // heads
    tensors = [TensorShape(fqn="embed", shape=(vocabulary, hidden), item_bytes=4, tp_dim=0)]
    matrices = (("q", (hidden, hidden), 0), ("kv", (2 * narrow, hidden), 0), ("o", (hidden, hidden), 1))
    matrices += (("up", (4 * hidden, hidden), 0), ("down", (hidden, 4 * hidden), 1))
    for i in range(blocks):
        unit = f"layers.{i}"
        tensors += [
            TensorShape(fqn=f"{unit}.{name}", shape=shape, item_bytes=4, unit=unit, layer=1 + i, tp_dim=dim)
            for name, shape, dim in matrices
        ]
    tokens = micro_size * sequence
    if not tied:
        tensors.append(
            TensorShape(fqn="head", shape=(vocabulary, hidden), item_bytes=4, layer=blocks + 1, tp_dim=0)
        )
    of_block = sum(t.numel for t in tensors if t.layer == 1)
    attention = 5 * heads * sequence * tokens
    block = Layer(
        name="block",
        seconds=block_s,
        activation_bytes=34 * tokens * hidden + attention,
        dropped_bytes=attention,
        dropped_s=0.05 * block_s,
    )
    head_s = block_s * vocabulary * hidden / of_block
    return ModelShape(
        tensors=tuple(tensors),
        micro_size=micro_size,
        layers=(
            Layer(name="before", seconds=0.0, block=False, reductions=1),
            *[block] * blocks,
            Layer(
                name="after",
                seconds=head_s,
                activation_bytes=8 * tokens * vocabulary,
                block=False,
                reductions=1,
            ),
        ),
        widths=Widths(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            feed_forward=4 * hidden,
            vocabulary=vocabulary,
            sequence=sequence,
        ),
        boundary_bytes=4 * tokens * hidden,
        sequence=sequence,
        tied=tied,
    )
