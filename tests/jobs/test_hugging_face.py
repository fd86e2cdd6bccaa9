"""Jobs on models of transformers begin with its own loss, and what they trained opens in it again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import write_part
from elastic_train.data.order import SampleOrder
from elastic_train.errors import TensorMismatch
from elastic_train.models.hugging_face import save_pretrained
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import take
from elastic_train.testing.gloo_pool import GlooPool

transformers = pytest.importorskip("transformers", reason="the models of these jobs come from transformers")
pytestmark = pytest.mark.ring2


@pytest.fixture(scope="module")
def pool() -> Iterator[GlooPool]:
    with GlooPool(2) as pool:
        yield pool


def causal(config: str, **more: str) -> Any:
    from jobs.finetune_hf import trainer

    return trainer(config=config, seq_len=16, global_size=4, micro_size=2, max_steps=1, workers="1:2", **more)


def classifier(config: str) -> Any:
    from jobs.classify_hf import trainer

    return trainer(config=config, global_size=6, micro_size=3, max_steps=1, length=24, workers="1:2")


def saved_directory(job: Any, directory: Path) -> str:
    """The job's model without dropout and with weights that no initialisation makes, saved."""
    torch.manual_seed(5)
    model = job("").task.model()
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(model.config, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory)
    return str(directory)


def theirs(job: Any, made: Any, directory: str) -> nn.Module:
    """What a plain script has before its first step, with dropout off."""
    seed = made.spec.batch.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not directory:
        return made.task.model().train()
    return kind_of(job).from_pretrained(directory).train()


def kind_of(job: Any) -> Any:
    causal_lm = transformers.AutoModelForCausalLM
    return causal_lm if job is causal else transformers.AutoModelForSequenceClassification


def plain_loss(job: Any, made: Any, model: Any) -> float:
    """Of the first global batch, computed by the model itself from `labels`."""
    data, batch = made.task.dataset(), made.spec.batch
    ids = SampleOrder(len(data), batch).sample_ids(1).tolist()
    total, count = 0.0, 0
    for i in ids:
        given = made.task.collate([data[i]])
        if job is causal:
            labels = given.clone()
            labels[labels == 258] = -100
            counted = int((labels[:, 1:] != -100).sum())
            found = model(input_ids=given[:, :-1]).logits
            loss = F.cross_entropy(found.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        else:
            counted = 1
            loss = model(labels=given.pop("label"), **given).loss
        total, count = total + float(loss.detach()), count + counted
    return total / count


@pytest.mark.parametrize(("job", "weights"), [(causal, "new"), (classifier, "new"), (classifier, "saved")])
def test_the_first_loss_is_that_of_transformers_and_the_outcome_opens_there(
    pool: GlooPool, tmp_path: Path, job: Any, weights: str
) -> None:
    directory = saved_directory(job, tmp_path / "given")
    if weights == "new":  # the configuration alone
        next(Path(directory).glob("*.safetensors")).unlink()
    made = job(directory)
    expected = plain_loss(job, made, theirs(job, made, directory if weights == "saved" else ""))
    gang = Gang(pool, made.task, made.spec)
    gang.form(gang.plan(1, 2))
    report = gang.run()[0]
    assert report.loss == pytest.approx(expected, rel=1e-6)
    trained = {name: values for (name, state), values in gang.whole().items() if state == "param"}
    commit(gang, tmp_path / "run")
    assert_opens(job, made, tmp_path, trained)
    with pytest.raises(TensorMismatch, match="it has no 0"):
        save_pretrained(str(tmp_path / "run"), nn.Sequential(nn.Linear(2, 2)), tmp_path / "other")


@pytest.mark.ring3
@pytest.mark.matrix
def test_a_run_on_saved_weights_begins_with_the_loss_of_transformers(tmp_path: Path) -> None:
    directory = saved_directory(causal, tmp_path / "given")
    made = causal(directory, storage=str(tmp_path), name="run")
    expected = plain_loss(causal, made, theirs(causal, made, directory))
    result = made.fit(local_nodes=2, quiet=True)
    assert [entry.loss for entry in result.ledger.kept] == [pytest.approx(expected, rel=1e-6)]
    held = open_checkpoint(str(tmp_path / "run"))
    trained = {name: held.read(name, "param") for name, _ in made.task.model().named_parameters()}
    assert_opens(causal, made, tmp_path, trained)


def assert_opens(job: Any, made: Any, directory: Path, trained: dict[str, Any]) -> None:
    """What `save_pretrained` writes of the run has the logits of the parameters that were trained."""
    save_pretrained(str(directory / "run"), made.task.model(), directory / "out")
    opened, problems = kind_of(job).from_pretrained(
        directory / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(problems.values()), problems
    ours, ids = made.task.model().eval(), torch.arange(12).reshape(1, 12)
    ours.set_attn_implementation("eager")  # its kernels round otherwise
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(torch.from_numpy(trained[name]))
        assert torch.equal(opened.eval()(ids).logits, ours(ids).logits)


def commit(gang: Gang, directory: Path) -> None:
    """What the ranks handed over at the last step, as a run commits it."""
    run = RunDirectory(open_store(str(directory)))
    term = run.begin_term("test")
    shares = [saved[-1] for saved in gang.pool.run(take, "saved", ranks=gang.processes)]
    (step, _, document) = shares[0]
    path = attempt_path(step=step, generation=1)
    names = ("tensor", "state", "dtype", "shape", "box", "data")
    parts = [
        write_part(run.store, path, rank, [Piece(**dict(zip(names, p, strict=True))) for p in pieces])
        for rank, (_, pieces, _) in enumerate(shares)
    ]
    assembled = assemble(run.store, path, parts, document, aliases=document["aliases"])
    run.commit(assembled, term=term, generation=1, step=step, lineage=[(1, 0)])
