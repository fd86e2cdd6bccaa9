"""Whose fault it is where a job does not load in a worker's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.cluster.error_causes import traceback_text
from elastic_train.errors import ElasticTrainError, UserCodeError
from elastic_train.train.device_errors import of_device


@contextmanager
def loading(worker: str, node: str) -> Iterator[None]:
    """Whatever importing the job's module raises is the job's own."""
    try:
        yield
    except (ElasticTrainError, MemoryError):
        raise
    except Exception as error:
        if (meant := of_device(error)) is not None:
            raise meant from error
        raise UserCodeError(
            worker=worker,
            rank=-1,
            node=node,
            step=0,
            phase="loading the job",
            error=f"{type(error).__name__}: {error}",
            traceback=traceback_text(error),
        ) from None
