"""What a torchtitan config can say that is not supported: refused by the field's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Refusal = tuple[str, Callable[[Any], bool], str, str]
REFUSED: tuple[Refusal, ...] = (
    (
        "training.global_batch_size",
        lambda c: c.training.global_batch_size < 1,
        "follows from the number of machines.",
        "Say how many samples a step has, on however many machines.",
    ),
    ("training.dtype", lambda c: c.training.dtype != "float32", "parameters are float32 here.", ""),
    (
        "training.enable_cpu_offload",
        lambda c: c.training.enable_cpu_offload,
        "has no counterpart here.",
        "Use more workers: plans divide the state.",
    ),
    (
        "parallelism.pipeline_parallel_degree",
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "its blocks are in a ModuleDict, and pipelines are cut in a ModuleList.",
        "Use tensor parallelism.",
    ),
    (
        "parallelism.context_parallel_degree",
        lambda c: c.parallelism.context_parallel_degree > 1,
        "its sequence is not divided that way here.",
        "Use tensor parallelism, which divides positions too.",
    ),
    (
        "parallelism.expert_parallel_degree",
        lambda c: c.parallelism.expert_parallel_degree > 1,
        "experts of torchtitan are not divided here.",
        "",
    ),
    (
        "model_spec.model.layers",
        lambda c: any(layer.moe is not None for layer in c.model_spec.model.layers),
        "mixtures of experts are not supported: their balance is moved outside of the model.",
        "",
    ),
    (
        "model_spec.model",
        lambda c: _own_masks(type(c.model_spec.model)),
        "makes attention masks of its own, and attention is causal over whole windows here.",
        "Write a Task, and build the model in it.",
    ),
    (
        "model_spec.model.layers",
        lambda c: any(getattr(layer, "attention", None) is None for layer in c.model_spec.model.layers),
        "a layer has no attention.",
        "Write a Task, and build the model in it.",
    ),
    (
        "model_spec.model.layers",
        lambda c: any(_window(layer) not in (None, (-1, 0)) for layer in c.model_spec.model.layers),
        "attention within a sliding window, or to what comes later, is not supported.",
        "Write a Task, and build the model in it.",
    ),
    (
        "model_spec.post_optimizer_build_fn",
        lambda c: c.model_spec.post_optimizer_build_fn is not None,
        "hooks of an optimizer would see one rank's part.",
        "Edit gradients in a Task of your own.",
    ),
    (
        "optimizer.param_groups",
        lambda c: {g.optimizer_name for g in c.optimizer.param_groups} not in ({"Adam"}, {"AdamW"}),
        "is not one of Adam or AdamW for all parameters.",
        "",
    ),
    (
        "optimizer.optimizer_factory_kwargs_by_name",
        lambda c: any(c.optimizer.optimizer_factory_kwargs_by_name.get(name) for name in ("Adam", "AdamW")),
        "is not passed on.",
        "Say it in optimizer_kwargs of the groups.",
    ),
    (
        "optimizer.implementation",
        lambda c: c.optimizer.implementation not in ("fused", "foreach", "for-loop"),
        "its moments would not be float32.",
        'Use "fused".',
    ),
    (
        "loss",
        lambda c: _kind(getattr(c.loss, "loss_fn", c.loss)) != "CrossEntropyLoss.Config",
        "is no cross entropy.",
        "Write a Task, and build the model in it.",
    ),
    (
        "compile.enable",
        lambda c: c.compile.enable,
        "is not passed on.",
        "Write a Task whose model() compiles its blocks.",
    ),
    ("override.imports", lambda c: bool(c.override.imports), "overrides are not applied.", ""),
    (
        "validator.enable",
        lambda c: c.validator.enable,
        "its data loader is a stream.",
        "Give torchtitan.trainer(evaluation=et.Evaluation(dataset=...)).",
    ),
    (
        "checkpoint.initial_load_path",
        lambda c: bool(c.checkpoint.initial_load_path),
        "is not read.",
        "Give torchtitan.trainer(resume_from=...).",
    ),
    (
        "checkpoint.load_step",
        lambda c: c.checkpoint.enable and c.checkpoint.load_step != -1,
        "a run goes on from its newest checkpoint.",
        "Give torchtitan.trainer(resume_from=...) for another one.",
    ),
    (
        "checkpoint.exclude_from_loading",
        lambda c: c.checkpoint.enable and not {"dataloader"}.issuperset(c.checkpoint.exclude_from_loading),
        "a run goes on with the whole of its state.",
        'Leave it out; "dataloader" may stay.',
    ),
    (
        "checkpoint.load_only",
        lambda c: c.checkpoint.enable and c.checkpoint.load_only,
        "a run always saves.",
        "",
    ),
    (
        "checkpoint.create_seed_checkpoint",
        lambda c: c.checkpoint.enable and c.checkpoint.create_seed_checkpoint,
        "initial values follow from the seed, under every plan.",
        "Leave it out.",
    ),
    (
        "checkpoint.last_save_in_hf",
        lambda c: c.checkpoint.enable and c.checkpoint.last_save_in_hf,
        "the last checkpoint is like the others.",
        "Give torchtitan.save_checkpoint(...) to torchtitan's own converter.",
    ),
    (
        "checkpoint.keep_latest_k",
        lambda c: c.checkpoint.enable and c.checkpoint.keep_latest_k == 0,
        "keeps all.",
        "Say how many are to stay.",
    ),
    (
        "debug.deterministic",
        lambda c: c.debug.deterministic,
        "a run is repeatable under the same plans as it is.",
        "Leave it out.",
    ),
    (
        "debug.detect_anomaly",
        lambda c: c.debug.detect_anomaly,
        "is not set in the workers.",
        "A gradient that is not finite ends a run after limits=Limits(not_finite=...).",
    ),
    (
        "debug.batch_invariant",
        lambda c: c.debug.batch_invariant,
        "is not set in the workers.",
        "",
    ),
)
"""Of a config: the field, whether it says what is not supported, why that is so, what to do instead."""


def _own_masks(config: type) -> bool:
    """Whether the model of a config has masks other than those of all decoders, of documents."""
    kind: Any = sys.modules[config.__module__]
    for name in config.__qualname__.split(".")[:-1]:
        kind = getattr(kind, name)
    made = getattr(kind, "get_attention_masks", None)
    return made is not None and not made.__module__.startswith("torchtitan.models.common.")


def _window(layer: Any) -> Any:
    """The window of a layer's attention, where its kernel knows one."""
    return getattr(getattr(layer.attention, "inner_attention", None), "window_size", None)


def _kind(config: Any) -> str:
    return type(config).__qualname__
