"""torchtitan's configs under this engine: losses of its own parts alone, its checkpoints both ways."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.train import RunConfig, ScalingConfig

import elastic_train as et
from elastic_train.checkpoint.begin import begin
from elastic_train.errors import ConfigError, TensorMismatch
from elastic_train.integrations.torchtitan.field_table import FIELDS, names_of
from elastic_train.planner.plan import Mesh
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from tests.train.test_train_from_foreign import restored

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")
with warnings.catch_warnings():  # of torch's own modules, which torchtitan imports
    warnings.simplefilter("ignore")
    from tests.tasks.titan import LENGTH, STEPS, Titan, config, windows

pytestmark = [pytest.mark.ring2, pytest.mark.timeout(1000), pytest.mark.filterwarnings("default")]
SAVED = 3
PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"


def trainer(made: Any, **options: Any) -> et.ElasticTrainer:
    return et.torchtitan.trainer(
        made,
        options.pop("dataset", windows()),
        scaling_config=ScalingConfig(num_workers=(1, 4)),
        run_config=RunConfig(name="titan", storage_path="/nowhere"),
        **options,
    )


def test_losses_are_those_of_torchtitans_own_parts() -> None:
    ours = trainer(config())
    found = train_alone(ours.task, ours.spec)
    theirs = Titan(config())
    expected = theirs.train(windows(), ours.spec.batch, 1, STEPS)
    np.testing.assert_allclose([r.loss for r in found], expected, rtol=1e-6)
    assert [r.rates[0] for r in found] == pytest.approx(theirs.rates_of_steps, rel=1e-12)


def test_labels_that_torchtitan_ignores_count_nowhere() -> None:
    pairs = [(w[:-1], w[1:].clone()) for w in windows()]
    for number, (_, labels) in enumerate(pairs):
        labels[: number % LENGTH] = -100
    ours = trainer(config(), dataset=pairs)
    found = train_alone(ours.task, ours.spec)
    expected = Titan(config()).train(pairs, ours.spec.batch, 1, STEPS)
    np.testing.assert_allclose([r.loss for r in found], expected, rtol=1e-6)


@pytest.fixture
def titan_pool(pool: GlooPool) -> GlooPool:
    """Of processes that have imported torchtitan, which takes long where others are at work."""
    pool.run(loaded, timeout=900.0)
    return pool


def loaded(state: dict[str, Any]) -> None:
    Titan(config())


PLANS = [
    (Mesh(dp_replicate=2), {}),
    (Mesh(dp_shard=3), {}),
    (Mesh(tp=2), {}),
    (Mesh(dp_shard=2, tp=2), {"sequence_parallel": True}),
]


@pytest.mark.parametrize(("mesh", "changes"), PLANS, ids=str)
def test_every_plan_computes_what_one_process_does(
    titan_pool: GlooPool, mesh: Mesh, changes: dict[str, Any]
) -> None:
    ours = trainer(config())
    gang = Gang(titan_pool, ours.task, ours.spec)
    gang.form(gang.plan_on(mesh, **changes))
    found = gang.run()
    expected = Titan(config()).train(windows(), ours.spec.batch, 1, STEPS)
    np.testing.assert_allclose([r.loss for r in found], expected, rtol=1e-5)


def test_a_run_goes_on_from_torchtitans_checkpoint_and_torchtitan_from_a_runs(
    titan_pool: GlooPool, tmp_path: Path
) -> None:
    """Each time with the next losses of the other's own."""
    ours, theirs = trainer(config()), Titan(config())
    theirs.train(windows(), ours.spec.batch, 1, SAVED)
    saved = theirs.save(tmp_path / "theirs", SAVED)
    expected = theirs.train(windows(), ours.spec.batch, SAVED + 1, STEPS)

    given = et.ResumeFrom(url=str(saved), specification=et.torchtitan.specification(config()), copy=True)
    run = str(tmp_path / "run")
    assert begin(open_store(run), given, holder="test").step == SAVED
    gang = Gang(titan_pool, ours.task, ours.spec)
    plan = gang.plan(1, 2)
    gang.join(plan, range(plan.world_size))
    assert len({digest for digest, _ in titan_pool.run(restored, run, ranks=gang.processes)}) == 1
    found = gang.run()
    assert [r.step for r in found] == [*range(SAVED + 1, STEPS + 1)]
    np.testing.assert_allclose([r.loss for r in found], expected, rtol=1e-6)

    back = Titan(config())
    written = et.torchtitan.save_checkpoint(run, tmp_path / "back", config())
    assert written.name == f"step-{SAVED}"
    assert back.load(tmp_path / "back") == SAVED
    assert back.train(windows(), ours.spec.batch, SAVED + 1, STEPS) == pytest.approx(expected, rel=1e-6)
    larger = config()
    larger.model_spec.model.layers.append(larger.model_spec.model.layers[-1])
    with pytest.raises(TensorMismatch, match=r"layers\.2\..* and none of it in the run"):
        et.torchtitan.save_checkpoint(run, tmp_path / "other", larger)


def _changed(path: str, value: Any) -> Any:
    made = config()
    at, _, name = path.rpartition(".")
    owner = made
    for part in filter(None, at.split(".")):
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.global_batch_size", -1),
        ("training.dtype", "bfloat16"),
        ("training.enable_cpu_offload", True),
        ("parallelism.pipeline_parallel_degree", 2),
        ("parallelism.context_parallel_degree", 2),
        ("parallelism.expert_parallel_degree", 2),
        ("model_spec.post_optimizer_build_fn", print),
        ("optimizer.implementation", "fused_opt_states_bf16"),
        ("compile.enable", True),
        ("override.imports", ["somewhere"]),
        ("validator.enable", True),
        ("checkpoint.initial_load_path", "outputs"),
        ("checkpoint.load_step", 3),
        ("checkpoint.exclude_from_loading", ["optimizer"]),
        ("checkpoint.load_only", True),
        ("checkpoint.create_seed_checkpoint", True),
        ("checkpoint.last_save_in_hf", True),
        ("checkpoint.keep_latest_k", 0),
        ("optimizer.optimizer_factory_kwargs_by_name", {"AdamW": {"capturable": True}}),
        ("debug.deterministic", True),
        ("debug.detect_anomaly", True),
        ("debug.batch_invariant", True),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(path: str, value: Any) -> None:
    made = _changed(path, value)
    made.checkpoint.enable = True
    with pytest.raises(ConfigError) as refused:
        trainer(made)
    assert refused.value.field == f"config.{path}"


def test_other_losses_optimizers_and_models_are_refused_by_name() -> None:
    from torchtitan.components.loss import MSELoss

    made = config()
    made.optimizer.param_groups[0].optimizer_name = "DistMuon"
    for refused, field in (
        (_changed("loss", MSELoss.Config()), "config.loss"),
        (made, "config.optimizer.param_groups"),
        (object(), "torchtitan.trainer(config)"),
    ):
        with pytest.raises(ConfigError) as told:
            trainer(refused)
        assert told.value.field == field


def test_attention_that_is_not_causal_over_a_whole_window_is_refused() -> None:
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.llama3.model import Llama3Model

    class Masked(Llama3Model):
        @dataclass(kw_only=True, slots=True)
        class Config(Llama3Model.Config):
            pass

        def get_attention_masks(self, positions: torch.Tensor) -> Any:
            return super().get_attention_masks(positions)

    globals()["Masked"] = Masked
    Masked.__qualname__, Masked.Config.__qualname__ = "Masked", "Masked.Config"
    masked, window, linear = config(), config(), config()
    given = {each.name: getattr(masked.model_spec.model, each.name) for each in fields(Llama3Model.Config)}
    masked.model_spec.model = Masked.Config(**given)
    window.model_spec.model.layers[1].attention.inner_attention = VarlenAttention.Config(window_size=(8, 0))
    linear.model_spec.model.layers[1].attention = None
    for refused, field in ((masked, "model"), (window, "model.layers"), (linear, "model.layers")):
        with pytest.raises(ConfigError) as told:
            trainer(refused)
        assert told.value.field == f"config.model_spec.{field}"


def test_each_field_of_a_config_is_in_the_table_and_no_other() -> None:
    assert FIELDS.keys() == {*names_of(config())}


def test_the_page_has_the_table() -> None:
    rows: list[str] = []
    for name, (treatment, why) in sorted(FIELDS.items(), key=lambda each: each[0].partition(".")[0]):
        section, _, field = name.partition(".")
        rows.append(f"| `{section}` | {f'`{field}`' if field else ''} | {treatment} | {why} |")
    assert "\n".join(rows) in PAGE.read_text()


def test_a_field_without_effect_is_told_and_one_of_a_newer_version_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = _changed("parallelism.data_parallel_replicate_degree", 4)
    trainer(made)
    assert "parallelism.data_parallel_replicate_degree" in caplog.text

    @dataclass(kw_only=True)
    class Newer(type(made.debug)):
        sparkle: float = 0.0

    for value, expected in ((0.0, nullcontext()), (0.5, pytest.raises(ConfigError, match=r"debug\.sparkle"))):
        with expected:
            trainer(_changed("debug", Newer(seed=3, sparkle=value)))


def test_a_trainer_of_ones_own_is_refused() -> None:
    from torchtitan.trainer import Trainer

    class Mine(Trainer):
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

    given = config()
    with pytest.raises(ConfigError, match=r"Mine\.Config of .*, whose trainer nobody would call"):
        trainer(Mine.Config(**{each.name: getattr(given, each.name) for each in fields(given)}))


def test_sizes_and_degrees_are_the_configs_and_options_win() -> None:
    made = config(tensor_parallel_degree=2, data_parallel_shard_degree=4)
    made.checkpoint.enable, made.checkpoint.interval = True, 7
    spec = trainer(made).spec
    assert spec.batch == et.Batch(global_size=8, micro_size=2, seed=made.debug.seed)
    assert (spec.max_steps, spec.clip_norm, spec.precision) == (STEPS, 1.0, "fp32")
    assert spec.parallelism == et.Parallelism(tp=2, dp_shard=4)
    assert (spec.checkpoints.every, spec.checkpoints.keep) == (7, 10)
    own = trainer(made, max_steps=9, parallelism=et.Parallelism()).spec
    assert (own.max_steps, own.parallelism) == (9, et.Parallelism())
    halves = dataclasses.replace(made.training, mixed_precision_param="bfloat16")
    assert trainer(_changed("training", halves)).spec.precision == "bf16"
    assert torch.float32 == next(trainer(made).task.model().parameters()).dtype
