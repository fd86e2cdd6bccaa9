"""Programs of other people as loops: each equals a script of one process, through a kill, a move and growth.

Their models and data are in a directory that `PORTS` names, and are not shipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import RunConfig, ScalingConfig

import elastic_train as et
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from tests.ports import images, others, texts
from tests.ports.script import PORTS, Script
from tests.train.test_loops import broken_off, losses

pytestmark = [
    pytest.mark.ring2,
    pytest.mark.filterwarnings("default"),  # what these programs warn of is their own
    pytest.mark.skipif(
        not (PORTS / "kit.py").is_file(), reason="PORTS names no directory with programs of other people"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Port:
    """`epochs` or `steps` is its length. `shards` is false where it asks for whole parameters, and
    `phase` where the rank is killed that computes its second step."""

    loop: Callable[[Any], None]
    script: Callable[[Script], None]
    batch: et.Batch
    epochs: int | None = None
    steps: int | None = None
    clip_norm: float | None = None
    precision: Any = "fp64"
    shards: bool = True
    phase: str = "backward"
    rtol: float = 1e-9


OF_IMAGES = et.Batch(global_size=32, micro_size=8)
OF_COLUMNS = et.Batch(global_size=texts.COLUMNS, micro_size=2, shuffle=False)


def of_words(kind: str) -> Port:
    return Port(
        loop=partial(texts.words, kind=kind),
        script=partial(texts.words_script, kind=kind),
        batch=OF_COLUMNS,
        epochs=2,
        clip_norm=0.25,
    )


PORTED = {
    "mnist": Port(loop=images.mnist, script=images.mnist_script, batch=OF_IMAGES, epochs=2),
    "imagenet": Port(loop=images.imagenet, script=images.imagenet_script, batch=OF_IMAGES, epochs=2),
    "vae": Port(loop=images.vae, script=images.vae_script, batch=OF_IMAGES, epochs=3),
    "dcgan": Port(loop=images.dcgan, script=images.dcgan_script, batch=OF_IMAGES, epochs=2, shards=False),
    "word_language_model LSTM": of_words("LSTM"),
    "word_language_model GRU": of_words("GRU"),
    "word_language_model Transformer": of_words("Transformer"),
    "minGPT": Port(
        loop=texts.mingpt,
        script=texts.mingpt_script,
        batch=et.Batch(global_size=16, micro_size=4),
        epochs=2,
        clip_norm=1.0,
        precision="fp32",
        rtol=1e-5,
    ),
    "gcn": Port(
        loop=others.gcn,
        script=others.gcn_script,
        batch=et.Batch(global_size=others.NODES, micro_size=others.NODES),
        steps=6,
        phase="reduce",
    ),
    "reinforce": Port(
        loop=others.reinforce,
        script=others.reinforce_script,
        batch=et.Batch(global_size=1, micro_size=1),
        steps=6,
        precision="fp32",
        phase="reduce",
        rtol=1e-6,
    ),
    "time_sequence_prediction": Port(
        loop=others.waves,
        script=others.waves_script,
        batch=et.Batch(global_size=17, micro_size=5),
        steps=5,
        shards=False,
        rtol=1e-7,
    ),
}


@pytest.mark.parametrize("name", PORTED)
def test_a_port_is_its_script_through_a_kill_a_move_and_growth(
    pool: GlooPool, tmp_path: Path, name: str
) -> None:
    port = PORTED[name]
    made = et.ElasticTrainer(
        port.loop,
        batch=port.batch,
        max_epochs=port.epochs,
        max_steps=port.steps,
        clip_norm=port.clip_norm,
        precision=port.precision,
        scaling_config=ScalingConfig(num_workers=(1, 3)),
        run_config=RunConfig(name="port", storage_path=str(tmp_path)),
    )
    dtype = torch.float64 if port.precision == "fp64" else torch.float32
    script = Script(batch=port.batch, steps=made.spec.max_steps, clip_norm=port.clip_norm, dtype=dtype)
    port.script(script)

    gang = Gang(pool, made.task, made.spec)
    gang.form(gang.plan(2, 1), [0, 1])
    reports = broken_off(gang, 0, port.phase, 2)
    plan = gang.plan(1, 2) if port.shards else gang.plan(2, 1)
    gang.form(plan, [1, 2], From(generation=gang.generation, step=1, holders=(1,)))
    reports += gang.pause_at(4)
    gang.form(gang.plan(3, 1), [2, 3, 1], gang.held())
    reports += gang.run()
    assert losses(reports) == pytest.approx(script.losses, rel=port.rtol)
    told: dict[int, dict[str, float]] = {}
    for report in reports:
        told.setdefault(report.step, {}).update(report.metrics)
    for step, metrics in script.told.items():
        assert {n: told[step][n] for n in metrics} == pytest.approx(metrics, rel=port.rtol), step
