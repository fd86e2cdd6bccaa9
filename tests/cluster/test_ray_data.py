"""A Ray Data data set becomes numbered samples that stay as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray

from elastic_train.cluster import ray_data as module
from elastic_train.cluster.driver.launch import prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_data import from_ray_data
from elastic_train.data.identity import identify
from elastic_train.errors import DataMismatch, StorageError

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.filterwarnings("default")]
ROWS = 600


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    prepare_local_environment()
    with LocalCluster(2):
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


@pytest.mark.usefixtures("_cluster")
def test_a_data_set_is_executed_once_and_its_order_is_that_of_its_blocks(tmp_path: Path) -> None:
    executed = tmp_path / "executed"
    executed.mkdir()

    def doubled(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        (executed / f"{batch['id'][0]}-{time.monotonic_ns()}").touch()
        if batch["id"][0] < 100:
            time.sleep(1.0)  # the first block is ready last
        return {"id": batch["id"], "twice": 2 * batch["id"]}

    made = ray.data.range(ROWS, override_num_blocks=6).map_batches(doubled, batch_size=None)
    table = from_ray_data(made, str(tmp_path / "t"))
    assert [table[i] for i in range(ROWS)] == [{"id": i, "twice": 2 * i} for i in range(ROWS)]
    ran = len([*executed.iterdir()])
    assert len(from_ray_data(made, str(tmp_path / "t"))) == ROWS
    assert len([*executed.iterdir()]) == ran, "the second call reads what the first one wrote"


@pytest.mark.usefixtures("_cluster")
def test_rows_are_written_by_other_processes_than_the_driver(tmp_path: Path) -> None:
    """So storage of one process alone is none."""
    with pytest.raises(StorageError, match="all nodes share"):
        from_ray_data(ray.data.range(10), f"memory://{tmp_path.name}/t")


@pytest.mark.usefixtures("_cluster")
def test_arrays_of_many_shapes_are_kept_and_a_column_of_two_types_is_refused_by_name(tmp_path: Path) -> None:
    ragged = [{"x": np.arange(1 + i % 3, dtype=np.int16)} for i in range(40)]
    table = from_ray_data(ray.data.from_items(ragged, override_num_blocks=40), str(tmp_path / "ragged"))
    assert all((table[i]["x"] == ragged[i]["x"]).all() for i in range(40))
    assert table[7]["x"].dtype == np.int16

    def typed(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"id": batch["id"].astype(np.float32 if batch["id"][0] else np.int64)}

    mixed = ray.data.range(20, override_num_blocks=2).map_batches(typed, batch_size=None)
    with pytest.raises(DataMismatch, match="column 'id' is int64 in some rows and float in others"):
        from_ray_data(mixed, str(tmp_path / "mixed"))
    assert len(from_ray_data(ray.data.range(5), str(tmp_path / "mixed"))) == 5, "nothing was left of it"


@pytest.mark.usefixtures("_cluster")
def test_integers_are_exact_beside_missing_ones_in_rows_and_in_lists(tmp_path: Path) -> None:
    large = 2**60 + 1
    table = pa.table(
        {
            "id": pa.array([large, None, *range(18)]),
            "small": pa.array([None, 7] + [1] * 18, pa.uint8()),
            "lists": pa.array([[large, None], None] + [[1]] * 18),
            "deep": pa.array([[[large]], [[None]]] + [[[1], [2]]] * 18),
            "real": pa.array([0.5, None] + [1.0] * 18),
        }
    )
    whole = ray.data.from_arrow([table.slice(0, 2), table.slice(2)])
    read = from_ray_data(whole, str(tmp_path / "arrow"))
    assert [read[i]["id"] for i in range(20)] == [large, None, *range(18)]
    assert (read[0]["small"], read[1]["small"], read[2]["small"]) == (None, 7, 1)
    assert (read[0]["lists"], read[1]["lists"], read[2]["lists"].dtype) == ([large, None], None, np.int64)
    assert read[0]["deep"].tolist() == [[large]]
    assert read[1]["deep"] == [[None]]
    assert np.isnan(read[1]["real"])
    frame = pd.DataFrame({"id": pd.array([large, None], dtype="Int64"), "x": [np.zeros(2), np.ones(2)]})
    read = from_ray_data(ray.data.from_pandas(frame), str(tmp_path / "pandas"))
    assert [read[i]["id"] for i in range(2)] == [large, None]
    assert read[1]["x"].tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("_cluster")
def test_a_column_that_has_no_type_is_refused_by_name(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    made = ray.data.from_arrow(pa.table({"id": [1, 2], "counts": maps}))
    with pytest.raises(DataMismatch, match=r"column 'counts' cannot be written: .* a text of a map"):
        from_ray_data(made, str(tmp_path / "t"))


@pytest.mark.usefixtures("_cluster")
def test_calls_at_the_same_time_have_the_rows_of_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shuffles in its own way, and a table is several files."""
    monkeypatch.setattr(module, "ROWS_PER_FILE", 100)

    def made(seed: int) -> list[int]:
        shuffled = ray.data.range(ROWS, override_num_blocks=6).random_shuffle(seed=seed)
        table = from_ray_data(shuffled, str(tmp_path / "t"))
        return [table[i]["id"] for i in range(ROWS)]

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(made, range(3))
    assert sorted(first) == list(range(ROWS))
    assert others == [first, first]
    assert made(7) == first
    assert len([*(tmp_path / "t").iterdir()]) == 2, "the marker, and one directory of rows"


@pytest.mark.usefixtures("_cluster")
def test_what_calls_left_that_were_broken_off_is_no_part_of_a_table(tmp_path: Path) -> None:
    left = tmp_path / "t" / "rows-0123abcd"
    left.mkdir(parents=True)
    (left / "000000.parquet").write_bytes(b"half a file")
    assert len(from_ray_data(ray.data.range(5), str(tmp_path / "t"))) == 5
    assert not left.exists()


@pytest.mark.usefixtures("_cluster")
def test_a_table_whose_marker_names_no_directory_is_read(tmp_path: Path) -> None:
    from_ray_data(ray.data.range(5), str(tmp_path / "t"))
    (rows,) = (tmp_path / "t").glob("rows-*")
    rows.rename(tmp_path / "t" / "rows")
    (tmp_path / "t" / module.DONE).write_text('{"columns": ["id"], "rows": 5}')
    assert [row["id"] for row in from_ray_data(ray.data.range(9), str(tmp_path / "t"))] == [0, 1, 2, 3, 4]
