"""Pretrain torchtitan's debug Llama 3 on text, by torchtitan's own config.

python jobs/titan_llama.py --max-steps 40    (needs the extra torchtitan)
"""

from __future__ import annotations

from ray.train import RunConfig, ScalingConfig
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import elastic_train as et
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.stdlib import StandardLibrary
from elastic_train.data.text import TextFiles


def trainer(
    *,
    layers: int = 6,
    data: str = "",
    seq_len: int = 64,
    global_size: int = 12,
    micro_size: int = 2,
    max_steps: int = 40,
    lr: float = 8e-4,
    seed: int = 0,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "titan_llama",
) -> et.ElasticTrainer:
    """Pretrain torchtitan's debug Llama 3 on the bytes of text files, or of Python's standard library."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[layers:]
    config.optimizer = default_adamw(lr=lr)
    config.training = TrainingConfig(
        local_batch_size=micro_size,
        global_batch_size=global_size,
        seq_len=seq_len,
        steps=max_steps,
        mixed_precision_param="float32",
    )
    config.validator.enable = False
    config.debug.seed = seed
    text = TextFiles(data or StandardLibrary(), seq_len=seq_len)
    least, _, most = workers.partition(":")
    return et.torchtitan.trainer(
        config,
        SourcePart(text, stop=-1),  # the last window is filled up
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
