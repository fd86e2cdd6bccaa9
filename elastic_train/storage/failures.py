"""Classify errors of storage drivers: retry, refuse, or a fault of this program.

Drivers raise types of their own (aiohttp, botocore, google, azure, paramiko, ...) that share no base and need
not be installed here. So a failure of the storage is told from a fault of this program by where its type is
defined: a programmer's built-in errors are the program's, everything else is what the storage did.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
from botocore.exceptions import ConnectionError as Connection

from elastic_train.errors import ElasticTrainError

Kind = Literal["missing", "exists", "expired", "denied", "transient", "final"]
"""`expired`: credentials that were good once. `denied`: a refusal that may be one, or a verdict."""

TRANSIENT_CODES = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # s3fs: SlowDown, ServiceUnavailable, 409
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,  # s3fs: any code it has no name for, ConditionalRequestConflict among them
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOLINK,
        errno.ENOTCONN,  # a FUSE file system whose daemon is restarted
        errno.EPIPE,
        errno.EREMOTEIO,  # s3fs: InternalError
        errno.ESHUTDOWN,  # a Lustre client that is evicted
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
EXPIRED_CODES = frozenset({errno.EKEYEXPIRED, errno.EKEYREJECTED, errno.ENOKEY})
"""Of file systems with tickets: they are renewed outside."""
TRANSIENT_TYPES = (
    ConnectionError,
    TimeoutError,
    EOFError,
    ssl.SSLError,
    socket.gaierror,
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,  # its cause carries a status of aiohttp's own
)
CERTIFICATE = ("SSLCertVerificationError", "ClientConnectorCertificateError")
TOLD_WRONG = (ImportError, LookupError, NotImplementedError, TypeError, ValueError)
EXPIRED = (
    "expired",
    "ExpiredToken",
    "RequestTimeTooSkewed",
    "TokenRefreshRequired",
    "InvalidToken",
    "CredentialRetrievalError",
    "RefreshError",
    "RefreshWithMFAUnsupportedError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
)
"""Words in a code, a type or a message of credentials that ended, or could not be renewed this time."""
DENIED = frozenset({401, 403})
GCSFS_FORBIDDEN, GCSFS_BAD = "Forbidden: ", "Bad Request: "
"""How gcsfs begins the plain OSError and ValueError that it makes of statuses 403 and 400."""
TRANSIENT_STATUS = frozenset({408, 409, 423, 425, 429, *range(500, 600)} - {501, 505, 507})
TRANSIENT_WORDS = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "Throttling",
    }
)
"""S3's codes of trouble that it answers with status 400."""
ON_THE_WAY = (
    Connection,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
)
"""Of botocore's own errors those of the network; its other ones are about its arguments."""


def of_the_storage(error: BaseException) -> bool:
    """Whether it is a failure of the storage or its driver, and not a fault of this program."""
    if not isinstance(error, Exception) or isinstance(error, ElasticTrainError):
        return False
    if type(error).__module__ != "builtins" or _of_gcsfs(error):
        return True
    return isinstance(error, OSError | EOFError | RuntimeError) and not isinstance(error, RecursionError)


def kind_of(error: BaseException) -> Kind:
    """What a failure means for another try."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, FileExistsError):
        return "exists"
    if _expired(error):
        return "expired"
    if any(_named(error, name) for name in CERTIFICATE):
        return "denied"  # it may be renewed, or be another's
    if isinstance(error, TRANSIENT_TYPES) or any(_code(link) in TRANSIENT_WORDS for link in _chain(error)):
        return "transient"
    status = next(statuses(error), 0)
    refused = isinstance(error, PermissionError) or str(error).startswith(GCSFS_FORBIDDEN)
    if refused or status in DENIED or _named(error, "NoCredentialsError"):
        return "denied"
    if _code(error) == "400" or _code(error.__cause__) == "400":
        return "denied"  # what S3 answers to a HEAD with a token that ended, without a word more
    if status:
        return "missing" if status == 404 else "transient" if status in TRANSIENT_STATUS else "final"
    if isinstance(error, TOLD_WRONG):
        return "final"
    if isinstance(error, RuntimeError) and type(error).__module__ == "builtins":
        # A session or loop of the driver that is closed: a new connection has another.
        return "expired" if "closed" in str(error) else "final"
    if isinstance(error, BotoCoreError):
        return "transient" if isinstance(error, ON_THE_WAY) else "final"
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return "transient" if error.errno in TRANSIENT_CODES else "final"
    return "transient"  # of a driver that says no more: mostly a connection that broke off in the middle


def _of_gcsfs(error: Exception) -> bool:
    return type(error) is ValueError and str(error).startswith(GCSFS_BAD)


def _expired(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in EXPIRED_CODES:
        return True
    denied = isinstance(error, PermissionError) or any(s in (400, *DENIED) for s in statuses(error))
    for link in _chain(error):
        said = (type(link).__name__, _code(link), str(link) if denied else "")
        if any(word.lower() in text.lower() for word in EXPIRED for text in said):
            return True
    return False


def statuses(error: BaseException) -> Iterator[int]:
    """HTTP statuses that the error or its causes carry, in the words of each driver."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
        for value in (
            getattr(link, "status", None),  # aiohttp
            getattr(link, "status_code", None),  # azure, huggingface_hub
            getattr(link, "code", None),  # gcsfs, urllib
            getattr(response, "status_code", None),  # requests, httpx
            metadata.get("HTTPStatusCode"),  # botocore
        ):
            number = _number(value)
            if 400 <= number < 600:
                yield number


def _code(error: BaseException | None) -> str:
    """S3's own word for it."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def _named(error: BaseException, name: str) -> bool:
    return any(kind.__name__ == name for link in _chain(error) for kind in type(link).__mro__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    link: BaseException | None = error
    for _ in range(8):
        if link is None:
            return
        yield link
        link = link.__cause__


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
