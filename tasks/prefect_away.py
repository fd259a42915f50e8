"""Does the Prefect server answer? A server that is down must not fail a run: check before optional calls."""

from __future__ import annotations

import time

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

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


def _answers() -> bool:
    try:
        # With settings of its own it is not the flow run's client, which tries again for long.
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": _TIMEOUT_S}, sync_client=True) as client,
        ):
            return client.api_healthcheck() is None
    except AWAY:
        return False
