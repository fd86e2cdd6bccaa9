"""Names of torchtitan's checkpoints: as its state dicts have them, where modules have others."""

from __future__ import annotations

from typing import Any


def specification(config: Any) -> dict[str, Any]:
    """For `ResumeFrom(specification=...)`, and `parse` of the checkpoint language.

    A fused projection of queries, keys and values is one parameter, under whose name its moments are kept;
    its weight is kept as three.
    """
    attention = config.model_spec.model.layers[0].attention
    rules: list[dict[str, Any]] = []
    if hasattr(attention.qkv_linear, "wqkv"):
        prefix, heads = "layers.{l}.attention.qkv_linear", attention.n_heads
        fused = {
            "op": "fuse",
            "heads": heads,
            "kv_heads": attention.n_kv_heads or heads,
            "grouped": True,
        }
        rules = [
            {
                "select": [f"{prefix}.{part}.{{n:weight|bias}}" for part in ("wq", "wk", "wv")],
                "to": f"{prefix}.wqkv.{{n:weight|bias}}",
                "operations": [fused],
                "only": ["param"],
            }
        ]
    return {"version": 1, "rest": "keep", "rule": rules}
