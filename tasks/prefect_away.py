"""Is the Prefect server away? A page that is gone must not cost a run, so whatever is only told to Prefect asks first."""

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
"""For so long an answer holds: a short stage tells several things."""

_answered: dict[str | None, float] = {}
"""Address of a server -> when it last answered."""


def prefect_answers(within_s: float = 0.0) -> bool:
    """Whether the server answers, now or within some seconds. Prefect's own client would try each call for a minute."""
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


class _Asker(NamedTuple):
    """What asks a server: to make it takes twice the CPU of an answer."""

    settings: Settings
    """Those that it was made of."""
    once: Settings
    """The same, without tries again."""
    client: SyncPrefectClient


_asker: _Asker | None = None


def _answers() -> bool:
    try:
        asker, profile = _current_asker(), get_settings_context().profile
        with SettingsContext(profile=profile, settings=asker.once):
            return asker.client.api_healthcheck() is None
    except AWAY:
        return False


def _current_asker() -> _Asker:
    global _asker
    settings = get_settings_context().settings
    if _asker is None or _asker.settings is not settings:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}) as once:
            # With settings of its own it is not the flow run's client.
            # A connection that was kept could be one to a server that has died.
            own = {"timeout": _TIMEOUT_S, "limits": httpx.Limits(max_keepalive_connections=0)}
            _asker = _Asker(settings, once, get_client(httpx_settings=own, sync_client=True))
    return _asker
