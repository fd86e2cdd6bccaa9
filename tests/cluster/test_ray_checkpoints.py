"""Checkpoints of a run as Ray Train knows them, in whatever storage the run is."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf
from ray.train import Result as RayResult

from elastic_train.checkpoint.commit import Assembled
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.driver.ray_checkpoints import RayCheckpoints
from elastic_train.storage.fsspec_store import open_store

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("default")]
LOSSES = {2: 0.5, 4: 0.25, 6: 0.75}


@pytest.fixture(params=["path", "file", "memory", "s3", "gcs", "azure"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a run, whose storage is reached as fsspec is configured, for want of another way to say it."""
    name = "my run #1"
    match request.param:
        case "path":
            return f"{tmp_path}/{name}"
        case "file":
            return f"file://{tmp_path}/{name}"
        case "memory":
            return f"memory://{uuid.uuid4()}/{name}"
        case kind:
            server: Any = request.getfixturevalue(kind)
            place = (server.container if kind == "azure" else server.bucket)("checkpoints")
            monkeypatch.setitem(conf, place.partition("://")[0], dict(server.options))
            return f"{place}/{uuid.uuid4()}/{name}"


def test_those_that_are_kept_can_be_read_and_compared_wherever_they_are(url: str) -> None:
    store = open_store(url)
    run = RunDirectory(store)
    checkpoints = RayCheckpoints(url)
    assert checkpoints.kept(run) == []
    term = run.begin_term("test")
    for step, loss in LOSSES.items():
        directory = f"checkpoints/step-{step:010}.g1"
        store.write(f"{directory}/inner/state.json", f"{step}".encode())
        assembled = Assembled(
            directory=directory, manifest_path=f"{directory}/m", manifest_hash="0" * 32, bytes=1
        )
        run.commit(assembled, term=term, generation=1, step=step, lineage=((1, 0),), metrics=[("loss", loss)])
    kept = checkpoints.kept(run)
    assert [metrics for _, metrics in kept] == [{"step": s, "loss": v} for s, v in LOSSES.items()]
    result = RayResult(
        metrics={},
        checkpoint=kept[-1][0],
        error=None,
        path=url,
        best_checkpoints=kept,
        _storage_filesystem=checkpoints.system,
    )
    assert result.checkpoint is not None
    there = pickle.loads(pickle.dumps(result.checkpoint))  # as a task of Ray's gets it
    with there.as_directory() as directory:
        assert (Path(directory) / "inner" / "state.json").read_text() == "6"
    with result.get_best_checkpoint("loss", "min").as_directory() as directory:  # type: ignore[union-attr]
        assert (Path(directory) / "inner" / "state.json").read_text() == "4"
    assert str(result)
