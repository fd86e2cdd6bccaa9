"""A Ray Data data set becomes numbered samples that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_data import from_ray_data
from elastic_train.data.identity import identify
from elastic_train.errors import DataMismatch

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.filterwarnings("default")]
ROWS = 600


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    prepare_local_environment()
    with LocalCluster(1, cpus=2):
        yield


@pytest.mark.usefixtures("_cluster")
def test_rows_keep_their_numbers_and_are_written_once(tmp_path: Path) -> None:
    images = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
    rows = [{"image": images[i], "label": i % 7, "text": f"row {i}"} for i in range(ROWS)]
    table = from_ray_data(ray.data.from_items(rows, override_num_blocks=5), str(tmp_path / "t"))
    assert len(table) == ROWS
    for i in (0, 255, 256, ROWS - 1):
        sample = table[i]
        assert sample["image"].dtype == np.float32
        assert (sample["image"] == images[i]).all()
        assert (sample["label"], sample["text"]) == (i % 7, f"row {i}")
    other = ray.data.from_items([{**row, "label": 99} for row in rows])
    again = from_ray_data(other, str(tmp_path / "t"))
    assert identify(again) == identify(table), "what was written stays"
    with pytest.raises(DataMismatch, match="holds the columns image, label, text"):
        from_ray_data(ray.data.from_items([{"id": 1}]), str(tmp_path / "t"))
