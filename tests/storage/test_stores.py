"""Every store, one contract."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import FaultyStore
from elastic_train.testing.s3_server import S3Server
from elastic_train.testing.store_contract import StoreContract

pytestmark = pytest.mark.ring1


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestMemoryUrl(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4()}/run")


class TestPosix(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/ü = 1+2 #3/run")


class TestS3(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, s3: S3Server) -> Store:
        url = f"{s3.bucket('contract')}/{uuid.uuid4()}/ü = 1+2 #3"
        return open_store(url, options=s3.options)


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore(), ())
