"""Which store does a URI mean, and what does it mean when the store refuses?

Every failure of a store becomes a ServiceError with endpoint, bucket, key and the setting to look at: the clients' own texts
name none of them.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from penstock.errors import ServiceError
from penstock.store_settings import settings_of

__all__ = ["DENIED", "endpoint_of", "is_local", "is_s3", "store_name", "store_problem"]

DENIED = ("ACCESS_DENIED", "Forbidden", "SignatureDoesNotMatch", "InvalidAccessKeyId", "status 403", "redentials")
"""Words by which the S3 clients say that the credentials were refused."""


def is_local(uri: str) -> bool:
    """Tell whether `uri` is a path on this machine (no scheme, or `file://`)."""
    return "://" not in uri or uri.startswith("file://")


def is_s3(uri: str) -> bool:
    """Tell whether `uri` is in an S3 store."""
    return uri.startswith(("s3://", "s3a://"))


def endpoint_of(uri: str) -> str | None:
    """The endpoint configured for an S3 URI; None for AWS itself and for other stores."""
    if not is_s3(uri):
        return None
    if (settings := settings_of(uri)) is not None:
        return settings.endpoint
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def store_name(uri: str) -> str:
    """The endpoint that a remote URI is at, in words."""
    return endpoint_of(uri) or f"the default {urlsplit(uri).scheme} endpoint"


def store_problem(uri: str, error: Exception) -> ServiceError:
    """Say which store, bucket and key failed, and which setting to look at."""
    address = urlsplit(uri)
    text = " ".join(f"{error}".split()) or type(error).__name__
    if isinstance(error, ImportError):
        return ServiceError(
            f"{uri} needs a package that is not installed: {text}",
            next_step=f"install it on {socket.gethostname()}, and on each node of a Ray cluster",
        )
    denied = isinstance(error, PermissionError) or any(word in text for word in DENIED)
    none = "Unable to locate credentials" in text
    what = "needs credentials for" if none else "refuses the credentials for" if denied else "fails for"
    # This may be a process on any node of a cluster, and keys do not travel: each machine has its own.
    host = socket.gethostname()
    advice = f"check the URL, the network and the credentials on {host}"
    settings = settings_of(uri)
    if settings is not None:
        keys = "anonymous: true" if settings.anonymous else f"{settings.env_prefix or 'AWS'}_ACCESS_KEY_ID on {host}"
        advice = f"look at `stores` in the pipeline file, which says of this bucket {settings.endpoint or 'Amazon'}, and {keys}"
    elif is_s3(uri):
        keys = (
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on {host}; a node of a Ray cluster has those that were set when "
            "`ray start` was called there"
        )
        advice = f"look at {keys if denied else 'AWS_ENDPOINT_URL'}"
    return ServiceError(
        f"{store_name(uri)} {what} bucket {address.netloc!r}, key {address.path.lstrip('/')!r}, asked by {host}: {text}",
        next_step=advice,
    )
