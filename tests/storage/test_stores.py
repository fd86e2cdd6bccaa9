"""Every store, one contract."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.retry import Backoff, Retry
from elastic_train.storage.store import Store
from elastic_train.testing.azure_server import KEY, AzureServer
from elastic_train.testing.faulty_store import Fail, FaultyStore
from elastic_train.testing.gcs_server import GCSServer
from elastic_train.testing.s3_server import S3Server
from elastic_train.testing.store_contract import StoreContract

pytestmark = pytest.mark.ring1
SOON = Retry(Backoff(first_s=0.01, total_s=0.1))


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestMemoryUrl(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4()}/run", retry=SOON)

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        def find(system: MemoryFileSystem, path: str, **kwargs: object) -> list[str]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryFileSystem, "find", find)
            patch.setattr(MemoryFileSystem, "ls", find)
            yield store


class TestPosix(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/ü = 1+2 #3/run", retry=SOON)

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        listing = os.scandir

        def scandir(path: Path) -> object:
            if str(path).endswith(directory):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return listing(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            yield store


class TestS3(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, s3: S3Server) -> Store:
        url = f"{s3.bucket('contract')}/{uuid.uuid4()}/ü = 1+2 #3"
        return open_store(url, options=s3.options)

    @pytest.fixture(autouse=True)
    def _server(self, s3: S3Server) -> None:
        self.server = s3

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        yield open_store(store.url, options={**self.server.options, "secret": "another's"}, retry=SOON)


class TestGCS(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, gcs: GCSServer) -> Store:
        return open_store(f"{gcs.bucket('contract')}/{uuid.uuid4()}/ü = 1+2 #3", options=gcs.options)

    @pytest.fixture(autouse=True)
    def _server(self, gcs: GCSServer) -> None:
        self.server = gcs

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        gcsfs = pytest.importorskip("gcsfs")

        async def refuse(system: object, *args: object, **kwargs: object) -> None:
            raise gcsfs.retry.HttpError({"code": 403, "message": "storage.objects.list is not allowed"})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gcsfs.core.GCSFileSystem, "_call_list_objects", refuse)
            yield open_store(store.url, options=self.server.options, retry=SOON)


class TestAzure(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def store(cls, azure: AzureServer) -> Store:
        return open_store(f"{azure.container('contract')}/{uuid.uuid4()}/ü = 1+2 #3", options=azure.options)

    @pytest.fixture(autouse=True)
    def _server(self, azure: AzureServer) -> None:
        self.server = azure

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        another = self.server.options["connection_string"].replace(KEY, KEY.replace("E", "F"))
        yield open_store(store.url, options={"connection_string": another}, retry=SOON)


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore(), ())

    @contextmanager
    def blind(self, store: Store, directory: str) -> Iterator[Store]:
        yield FaultyStore(store, [Fail(operation="list"), Fail(operation="names")])
