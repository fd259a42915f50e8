"""Which store does a URI mean, how is it reached, and what does it mean when the store refuses?

A pipeline file's `stores` gives endpoint, region and credentials of a bucket, or of a prefix in one. They travel to every
process as text in PENSTOCK_STORES; secrets do not: they are named by the variables that hold them, on each machine.
Every failure of a store becomes a ServiceError with endpoint, bucket, key and the setting to look at: the clients' own texts
name none of them.
"""

from __future__ import annotations

import functools
import json
import os
import socket
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from penstock.config import Section
from penstock.errors import PreflightError, ServiceError

__all__ = [
    "DENIED",
    "StoreAddress",
    "StoreSpec",
    "endpoint_of",
    "is_local",
    "is_s3",
    "settings_of",
    "store_name",
    "store_problem",
    "use_stores",
]

_VARIABLE = "PENSTOCK_STORES"

DENIED = ("ACCESS_DENIED", "Forbidden", "SignatureDoesNotMatch", "InvalidAccessKeyId", "status 403", "redentials")
"""Words in errors of the S3 clients about refused credentials."""


class StoreSpec(Section):
    """How one S3 store is reached. It takes nothing from AWS_ENDPOINT_URL: without `endpoint` it is Amazon's."""

    endpoint: Annotated[str | None, Field(pattern=r"^https?://[^/@]+/?$")] = None
    """URL of the store, such as `https://minio.example.org:9000`; Amazon's without."""
    region: str | None = None
    """The bucket's region. Without it AWS_REGION counts, and of Amazon's buckets the region is asked for."""
    anonymous: bool = False
    """Read without credentials, as public buckets allow."""
    env_prefix: Annotated[str | None, Field(pattern=r"^[A-Z][A-Z0-9_]*$")] = None
    """Upper-case letters, digits and `_`: credentials are in the variables `<env_prefix>_ACCESS_KEY_ID`,
    `<env_prefix>_SECRET_ACCESS_KEY` and, where there is one, `<env_prefix>_SESSION_TOKEN`, on this machine and on each node.
    Without it they are found as those of Amazon are."""

    @field_validator("endpoint")
    @classmethod
    def _without_slash(cls, endpoint: str | None) -> str | None:
        return endpoint and endpoint.rstrip("/")

    @model_validator(mode="after")
    def _has_one_kind_of_credentials(self) -> StoreSpec:
        if self.anonymous and self.env_prefix is not None:
            raise ValueError("anonymous takes no credentials; leave out env_prefix")
        return self

    def credentials(self) -> tuple[str, str, str | None] | None:
        """Return (key id, secret, session token) of `env_prefix`; None without it.

        Raises:
            PreflightError: a variable is not set on this machine.
        """
        if self.env_prefix is None:
            return None
        names = [f"{self.env_prefix}_ACCESS_KEY_ID", f"{self.env_prefix}_SECRET_ACCESS_KEY"]
        lacking = [name for name in names if not os.environ.get(name)]
        if lacking:
            raise PreflightError(
                f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not set on {os.uname().nodename}; `stores` "
                f"names them (env_prefix: {self.env_prefix})",
                next_step="set them where this command runs, and in the environment of `ray start` on each node of a cluster",
            )
        return os.environ[names[0]], os.environ[names[1]], os.environ.get(f"{self.env_prefix}_SESSION_TOKEN")


StoreAddress = Annotated[str, Field(pattern=r"^s3://[^/]+(/[^*?\[]*)?$")]
"""`s3://bucket`, or `s3://bucket/prefix` of what lies below."""


def is_local(uri: str) -> bool:
    """Tell whether `uri` is a path on this machine (no scheme, or `file://`)."""
    return "://" not in uri or uri.startswith("file://")


def is_s3(uri: str) -> bool:
    """Tell whether `uri` is in an S3 store."""
    return uri.startswith(("s3://", "s3a://"))


def endpoint_of(uri: str) -> str | None:
    """Return the endpoint configured for an S3 URI; None for AWS itself and for other stores."""
    if not is_s3(uri):
        return None
    if (settings := settings_of(uri)) is not None:
        return settings.endpoint
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def store_name(uri: str) -> str:
    """Return the endpoint of a remote URI, in words."""
    return endpoint_of(uri) or f"the default {urlsplit(uri).scheme} endpoint"


def store_problem(uri: str, error: Exception) -> ServiceError:
    """Make an error that names store, bucket and key, and the setting to check."""
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
        advice = f"look at `stores` in the pipeline file, which has {settings.endpoint or 'Amazon'} for this bucket, and {keys}"
    elif is_s3(uri):
        keys = (
            f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on {host}; a node of a Ray cluster has those that were set when "
            "`ray start` was called there"
        )
        advice = f"look at {keys if denied else 'the name of the bucket and AWS_ENDPOINT_URL'}"
    problem = ServiceError(
        f"{store_name(uri)} {what} bucket {address.netloc!r}, key {address.path.lstrip('/')!r}, asked by {host}: {text}",
        next_step=advice,
    )
    problem.transient = not (denied or none)
    return problem


def use_stores(stores: Mapping[str, StoreSpec]) -> None:
    """Let this process, and those that it starts, reach these stores so."""
    if stores:
        os.environ[_VARIABLE] = json.dumps({name: spec.model_dump(exclude_defaults=True) for name, spec in stores.items()})
    else:
        os.environ.pop(_VARIABLE, None)


def settings_of(uri: str) -> StoreSpec | None:
    """Return the settings of the store that `uri` is in, by the longest address that it lies below; None if it has none."""
    text = os.environ.get(_VARIABLE)
    if not text or "://" not in uri:
        return None
    path = f"{uri.split('://', 1)[1].rstrip('/')}/"
    found = _parsed(text)
    return next((spec for address, spec in found if path.startswith(address)), None)


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> list[tuple[str, StoreSpec]]:
    given: dict[str, Any] = json.loads(text)
    addresses = sorted(given, key=len, reverse=True)
    return [(f"{address.split('://', 1)[1].rstrip('/')}/", StoreSpec.model_validate(given[address])) for address in addresses]
