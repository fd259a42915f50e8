"""Does the Prefect server answer? A server that is down must not fail a run: check before optional calls."""

from __future__ import annotations

import time
from typing import NamedTuple

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings, temporary_settings

__all__ = ["AWAY", "prefect_answers"]


AWAY = (PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError)
"""What Prefect's client raises of a server that is away or refuses; RuntimeError where it first asks for the server's version,
ValueError where a proxy's page answers instead."""

_TIMEOUT_S = 5.0
_PAUSE_S = 1.0
_STILL_S = 1.0
"""How long an answer counts: a short stage makes several calls."""

_answered: dict[str | None, float] = {}
"""Address of a server -> when it last answered."""


def prefect_answers(within_s: float = 0.0) -> bool:
    """Return whether the server answers, now or within some seconds. Prefect's own client would try each call for a minute."""
    address, now = PREFECT_API_URL.value(), time.monotonic()
    if now - _answered.get(address, -_STILL_S) < _STILL_S:
        return True
    deadline = now + within_s
    while not _answers():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S)
    _answered[address] = time.monotonic()
    return True


class _HealthClient(NamedTuple):
    """A client for health checks; kept, since making one takes twice the CPU of a check."""

    settings: Settings
    """Settings at the time it was made."""
    once: Settings
    """The same, without retries."""
    client: SyncPrefectClient


_health_client: _HealthClient | None = None


def _answers() -> bool:
    try:
        health, profile = _current_health_client(), get_settings_context().profile
        with SettingsContext(profile=profile, settings=health.once):
            return health.client.api_healthcheck() is None
    except AWAY:
        return False


def _current_health_client() -> _HealthClient:
    global _health_client
    settings = get_settings_context().settings
    if _health_client is None or _health_client.settings is not settings:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}) as once:
            # With settings of its own it is not the flow run's client.
            # A connection that was kept could be one to a server that has died.
            own = {"timeout": _TIMEOUT_S, "limits": httpx.Limits(max_keepalive_connections=0)}
            _health_client = _HealthClient(settings, once, get_client(httpx_settings=own, sync_client=True))
    return _health_client
